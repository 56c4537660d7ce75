"""Drain jobs: empty segments before their node goes, by moving what they hold to others."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from mooncake_simulator.engine.http_client import CallError, HttpClient
from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.objects import SegmentStatus


class JobNotFoundError(Exception):
    """No such job."""


class SegmentNotFoundError(Exception):
    """No such segment."""


class JobStatus(IntEnum):
    """How far a job is."""

    CREATED = 0
    RUNNING = 1
    SUCCEEDED = 2
    FAILED = 3
    CANCELED = 4


def _now_ms() -> int:
    return int(time.time() * 1000)


@dataclass(slots=True)
class DrainJob:
    """One job; a unit is one object."""

    segments: list[str]
    targets: list[str]
    max_concurrency: int
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    status: JobStatus = JobStatus.CREATED
    created_ms: int = field(default_factory=_now_ms)
    updated_ms: int = field(default_factory=_now_ms)
    succeeded: int = 0
    blocked: int = 0
    active: int = 0
    migrated_bytes: int = 0
    message: str = ""
    task: asyncio.Task[None] | None = None

    def report(self) -> dict[str, Any]:
        """The answer to `GET /api/v1/drain_jobs/query`."""
        return {
            "success": True,
            "job_id": self.id,
            "type": 0,
            "type_name": "DRAIN",
            "status": int(self.status),
            "status_name": self.status.name,
            "created_at_ms_epoch": self.created_ms,
            "last_updated_at_ms_epoch": self.updated_ms,
            "segments": self.segments,
            "succeeded_units": self.succeeded,
            "failed_units": 0,
            "blocked_units": self.blocked,
            "active_units": self.active,
            "migrated_bytes": self.migrated_bytes,
            "message": self.message,
            "error_code": 0,
            "error_message": "",
        }


class DrainJobs:
    """Jobs of one master, finished ones included."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._jobs: dict[str, DrainJob] = {}

    def create(self, segments: Sequence[str], targets: Sequence[str], max_concurrency: int) -> DrainJob:
        """Begin to empty segments: nothing new is placed there from now on.

        Raises:
            SegmentNotFoundError: one of them is not mounted.
        """
        for name in (*segments, *targets):
            if name not in self._directory.segments:
                raise SegmentNotFoundError(f"SEGMENT_NOT_FOUND: {name}")
        job = DrainJob(list(segments), list(targets), max(1, max_concurrency))
        for name in segments:
            self._directory.segments[name].status = SegmentStatus.DRAINING
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._run(job))
        return job

    def find(self, job_id: str) -> DrainJob:
        """A job by its id.

        Raises:
            JobNotFoundError: there is none.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFoundError("JOB_NOT_FOUND")
        return job

    def cancel(self, job_id: str) -> DrainJob:
        """Stop a job; its segments take objects again.

        Raises:
            JobNotFoundError: there is none.
        """
        job = self.find(job_id)
        if job.task is not None and not job.task.done():
            job.task.cancel()
            job.status = JobStatus.CANCELED
            self._set_status(job, SegmentStatus.OK)
        return job

    async def stop(self) -> None:
        """End all jobs with the master."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: DrainJob) -> None:
        job.status = JobStatus.RUNNING
        for name in job.segments:
            await self._empty(job, name)
        job.status = JobStatus.FAILED if job.blocked else JobStatus.SUCCEEDED
        if job.blocked:
            job.message = f"{job.blocked} objects found no room elsewhere"
        self._set_status(job, SegmentStatus.DRAINING if job.blocked else SegmentStatus.DRAINED)
        job.updated_ms = _now_ms()

    async def _empty(self, job: DrainJob, name: str) -> None:
        client = HttpClient(f"http://{name}", timeout_s=60)
        targets = job.targets or [other for other in self._directory.segments if other not in job.segments]
        try:
            while batch := [o for o in self._directory.objects_in(name) if o.complete][: job.max_concurrency]:
                job.active = len(batch)
                size = sum(stored.size_bytes for stored in batch)
                await client.call("/transfer", {"size_bytes": size})
                moved = [stored for stored in batch if self._directory.move(stored.key, targets)]
                job.succeeded += len(moved)
                job.migrated_bytes += sum(stored.size_bytes for stored in moved)
                job.active = 0
                job.updated_ms = _now_ms()
                if len(moved) < len(batch):
                    job.blocked = len(self._directory.objects_in(name))
                    return
        except (CallError, OSError, TimeoutError) as error:
            job.blocked = len(self._directory.objects_in(name))
            job.message = f"{name}: {error}"
        finally:
            client.close()

    def _set_status(self, job: DrainJob, status: SegmentStatus) -> None:
        for name in job.segments:
            segment = self._directory.segments.get(name)
            if segment is not None:
                segment.status = status
