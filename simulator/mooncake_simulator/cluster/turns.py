"""The queue of one prefill instance whose prompts wait in the Conductor and take turns in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.prefill import Job, OneAtATime
from mooncake_simulator.cluster.series import Series


class OrderedQueue(OneAtATime):
    """What waits for a prefill instance, and what it computes: one prompt at a time.

    Whoever still waits for KV that is being fetched is passed over: the instance does not stand idle for it.

    Args:
        agenda: the time.
        order: who goes next.
        busy: where the seconds of computing are added up over time.
        on_end: called when a prompt is computed, before the next one begins.
    """

    def __init__(
        self,
        agenda: Agenda,
        order: QueueOrder,
        busy: Series | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(agenda, busy)
        self._order = order
        self._on_end = on_end
        self._jobs: list[Job] = []

    @property
    def occupied(self) -> bool:
        """Whether it computes, or somebody waits."""
        return self._running is not None or bool(self._jobs)

    @property
    def waiting(self) -> Sequence[Job]:
        """Those whose turn has not come."""
        return self._jobs

    def leave(self, job: Job) -> None:
        """One that waits is computed elsewhere."""
        self._jobs.remove(job)

    def add(self, job: Job) -> None:
        """Let a job wait for its turn."""
        self._jobs.append(job)
        self._agenda.at(job.ready_s, self._next)

    def _next(self) -> None:
        now_s = self._agenda.now_s
        if self._running is not None or not any(job.ready_s <= now_s for job in self._jobs):
            return
        by_facts = {id(job.waiting): job for job in self._jobs}
        waiting = [job.waiting for job in self._jobs if job.waiting is not None]
        in_turn = [by_facts[id(each)] for each in self._order.sequence(waiting, now_s)]
        job = next(job for job in in_turn if job.ready_s <= now_s)
        self._jobs.remove(job)
        self._compute(job)

    def _end(self, drain_s: float) -> None:
        assert self._running is not None
        done, self._running = self._running.done, None
        # First what has ended: who comes next depends on what is known of it.
        self._later.enter(drain_s, done)
        self._on_end()
        self._next()
