"""The master's admin port, in the form of Mooncake's `master_admin_service.cpp`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mooncake_simulator.engine.http_server import Exchange, Request
from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.drain import DrainJobs, JobNotFoundError, SegmentNotFoundError
from mooncake_simulator.store.metrics import CONTENT_TYPE, MasterMetrics
from mooncake_simulator.store.objects import Segment, StoredObject, Tier

_TEXT = "text/plain; version=0.0.4"
_OBJECT_NOT_FOUND = -704
_INVALID_PARAMS = -600
_SEGMENT_NOT_FOUND = -100
_JOB_NOT_FOUND = -1500
_GIB = 1 << 30
_NOT_THERE: dict[str, Any] = {
    "ok": False,
    "error": "OBJECT_NOT_FOUND",
    "values": None,
    "disk_values": None,
    "local_disk_values": None,
    "nof_values": None,
}


class DrainRequest(msgspec.Struct, kw_only=True):
    """`POST /api/v1/drain_jobs`."""

    segments: list[str]
    target_segments: list[str] = []
    max_concurrency: int = 4


class Quota(msgspec.Struct, kw_only=True):
    """`PUT /api/v1/tenant_quotas`."""

    tenant_id: str
    quota_bytes: int


class Admin:
    """Routes of the admin port."""

    def __init__(self, directory: Directory, metrics: MasterMetrics, jobs: DrainJobs) -> None:
        self._directory = directory
        self._metrics = metrics
        self._jobs = jobs
        self._quotas: dict[str, int] = {}
        self._routes: dict[tuple[str, str], Callable[[Request, Exchange], None]] = {
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/metrics/summary"): self._summary,
            ("GET", "/health"): self._health,
            ("GET", "/role"): lambda _, exchange: exchange.respond(b"leader", 200, _TEXT),
            ("GET", "/ha_status"): lambda _, exchange: exchange.respond(b"serving", 200, _TEXT),
            ("GET", "/leader"): lambda _, exchange: exchange.json({"present": False}),
            ("GET", "/kv_events/status"): self._events_status,
            ("GET", "/query_key"): self._query_key,
            ("GET", "/batch_query_keys"): self._batch_query_keys,
            ("GET", "/get_all_keys"): self._all_keys,
            ("GET", "/get_all_segments"): self._all_segments,
            ("GET", "/get_segments_detail"): self._segments_detail,
            ("GET", "/query_segment"): self._query_segment,
            ("GET", "/api/v1/segments/status"): self._segment_status,
            ("POST", "/api/v1/drain_jobs"): self._create_job,
            ("GET", "/api/v1/drain_jobs/query"): self._query_job,
            ("POST", "/api/v1/drain_jobs/cancel"): self._cancel_job,
            ("GET", "/api/v1/tenant_quotas"): self._show_quotas,
            ("PUT", "/api/v1/tenant_quotas"): self._set_quota,
            ("DELETE", "/api/v1/tenant_quotas"): self._delete_quota,
            ("POST", "/api/v1/remove_all"): self._remove_all,
        }

    async def __call__(self, request: Request, exchange: Exchange) -> None:
        """Answer one request."""
        route = self._routes.get((request.method, request.path))
        if route is None:
            exchange.respond(b"", 404)
            return
        try:
            route(request, exchange)
        except JobNotFoundError as error:
            _refuse(exchange, 404, _JOB_NOT_FOUND, str(error))
        except SegmentNotFoundError as error:
            _refuse(exchange, 404, _SEGMENT_NOT_FOUND, str(error))
        except msgspec.MsgspecError as error:
            _refuse(exchange, 400, _INVALID_PARAMS, f"Invalid JSON body: {error}")

    def _show_metrics(self, _: Request, exchange: Exchange) -> None:
        exchange.respond(self._metrics.render(self._directory), 200, CONTENT_TYPE)

    def _summary(self, _: Request, exchange: Exchange) -> None:
        exchange.respond(self._metrics.summary(self._directory).encode(), 200, _TEXT)

    def _health(self, _: Request, exchange: Exchange) -> None:
        exchange.json({"status": "ok", "role": "leader", "ha_state": "serving", "service_ready": True})

    def _events_status(self, _: Request, exchange: Exchange) -> None:
        fields = ("published_batches", "published_events", "dropped_events", "skipped_unparsed_keys")
        exchange.json({"enabled": False, **dict.fromkeys(fields, 0)})

    def _query_key(self, request: Request, exchange: Exchange) -> None:
        stored = self._directory.peek(request.query.get("key", ""))
        if stored is None:
            _refuse(exchange, 404, _OBJECT_NOT_FOUND, "OBJECT_NOT_FOUND")
        else:
            exchange.json({"success": True, "data": _replicas(stored)})

    def _batch_query_keys(self, request: Request, exchange: Exchange) -> None:
        keys = [key for key in request.query.get("keys", "").split(",") if key]
        if not keys:
            exchange.json({"success": False, "error": "No keys provided. Use ?keys=key1,key2,..."}, 400)
            return
        data: dict[str, Any] = {}
        for key in keys:
            stored = self._directory.peek(key)
            data[key] = _NOT_THERE if stored is None else _found(stored)
        exchange.json({"success": True, "data": data})

    def _all_keys(self, _: Request, exchange: Exchange) -> None:
        keys = "".join(f"{key}\n" for key in self._directory.readable_keys())
        exchange.respond(keys.encode(), 200, _TEXT)

    def _all_segments(self, _: Request, exchange: Exchange) -> None:
        names = "".join(f"{name}\n" for name in self._directory.segments)
        exchange.respond(names.encode(), 200, _TEXT)

    def _segments_detail(self, _: Request, exchange: Exchange) -> None:
        segments = [_detail(segment) for segment in self._directory.segments.values()]
        exchange.json({"total_segments": len(segments), "segments": segments})

    def _query_segment(self, request: Request, exchange: Exchange) -> None:
        segment = self._directory.segments.get(request.query.get("segment", ""))
        if segment is None:
            exchange.respond(b"Failed to query segment", 500, _TEXT)
            return
        text = (
            f"{segment.name}\nUsed(bytes): {segment.used_bytes}\nCapacity(bytes) : {segment.capacity_bytes}\n"
        )
        exchange.respond(text.encode(), 200, _TEXT)

    def _segment_status(self, request: Request, exchange: Exchange) -> None:
        name = request.query.get("segment", "")
        if not name:
            _refuse(exchange, 400, _INVALID_PARAMS, "Missing segment query parameter")
            return
        segment = self._directory.segments.get(name)
        if segment is None:
            raise SegmentNotFoundError("SEGMENT_NOT_FOUND")
        exchange.json(
            {
                "success": True,
                "segment": name,
                "status": int(segment.status),
                "status_name": segment.status.name,
                "error_code": 0,
                "error_message": "",
            }
        )

    def _create_job(self, request: Request, exchange: Exchange) -> None:
        asked = msgspec.json.decode(request.body, type=DrainRequest)
        job = self._jobs.create(asked.segments, asked.target_segments, asked.max_concurrency)
        exchange.json(_job_answer(job.id, "CREATED"))

    def _query_job(self, request: Request, exchange: Exchange) -> None:
        exchange.json(self._jobs.find(request.query.get("job_id", "")).report())

    def _cancel_job(self, request: Request, exchange: Exchange) -> None:
        job = self._jobs.cancel(request.query.get("job_id", ""))
        exchange.json(_job_answer(job.id, "CANCELED"))

    def _show_quotas(self, _: Request, exchange: Exchange) -> None:
        quotas = [{"tenant_id": tenant, "quota_bytes": quota} for tenant, quota in self._quotas.items()]
        exchange.json({"success": True, "data": quotas})

    def _set_quota(self, request: Request, exchange: Exchange) -> None:
        quota = msgspec.json.decode(request.body, type=Quota)
        self._quotas[quota.tenant_id] = quota.quota_bytes
        exchange.json({"success": True})

    def _delete_quota(self, request: Request, exchange: Exchange) -> None:
        self._quotas.pop(request.query.get("tenant_id", ""), None)
        exchange.json({"success": True})

    def _remove_all(self, _: Request, exchange: Exchange) -> None:
        self._metrics.called("remove_all")
        exchange.json({"success": True, "removed_count": self._directory.remove_all()})


def _refuse(exchange: Exchange, status: int, code: int, message: str) -> None:
    exchange.json({"success": False, "error_code": code, "error_message": message}, status)


def _job_answer(job_id: str, status: str) -> dict[str, Any]:
    return {"success": True, "job_id": job_id, "status": status, "error_code": 0, "error_message": ""}


def _replicas(stored: StoredObject) -> list[dict[str, Any]]:
    """Memory replicas only, as the real master lists them: a key on SSD alone is there with an empty list."""
    if stored.tier is not Tier.DRAM:
        return []
    return [
        {
            "size_": stored.size_bytes,
            "buffer_address_": 0,
            "protocol_": "tcp",
            "transport_endpoint_": stored.segment,
        }
    ]


def _found(stored: StoredObject) -> dict[str, Any]:
    """As Mooncake 0.3.13 answers: null for a kind of place in which the key does not lie."""
    on_ssd = [{"client_id": "", "object_size": stored.size_bytes, "transport_endpoint": stored.segment}]
    return {
        **_NOT_THERE,
        "ok": True,
        "error": None,
        "values": _replicas(stored),
        "local_disk_values": on_ssd if stored.tier is Tier.SSD else None,
    }


def _detail(segment: Segment) -> dict[str, Any]:
    capacity = segment.capacity_bytes
    return {
        "segment_name": segment.name,
        "segment_id": segment.client_id,
        "client_id": segment.client_id,
        "base_address": "0x0",
        "size_bytes": capacity,
        "size_human": f"{capacity / _GIB:g} GiB",
        "te_endpoint": segment.name,
        "protocol": "tcp",
        "status": segment.status.name,
        "allocator_used_bytes": segment.used_bytes,
        "allocator_capacity_bytes": capacity,
        "allocator_usage_percent": 100 * segment.used_bytes / capacity if capacity else 0.0,
    }
