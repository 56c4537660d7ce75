"""The queue of one prefill instance whose prompts wait in the Conductor and take turns in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from mooncake_core.ledger import Waiting
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.prefill import Job, OneAtATime
from mooncake_simulator.cluster.series import Series


class OrderedQueue(OneAtATime):
    """What waits for a prefill instance, and what it computes: one prompt at a time.

    Whoever still waits for KV that is being fetched is passed over, so that the instance does not stand idle;
    not where that would break a promise and waiting for the KV breaks none.

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
        job = self._chosen(now_s)
        if job is not None:
            self._jobs.remove(job)
            self._compute(job)

    def _chosen(self, now_s: float) -> Job | None:
        """Whose turn it is; None where it is better to wait for KV that is being fetched."""
        order = self._order
        jobs = {id(job.waiting): job for job in self._jobs}
        in_turn = order.sequence([job.waiting for job in self._jobs if job.waiting is not None], now_s)
        ready = [each for each in in_turn if jobs[id(each)].ready_s <= now_s]
        first = ready[0]
        if first is in_turn[0] or all([each.latest_end_s == inf for each in in_turn]):
            return jobs[id(first)]
        for each in ready:
            others = [_with_kv(jobs[id(other)]) for other in in_turn if other is not each]
            if order.can_wait(others, now_s, now_s + each.cost_us / 1e6):
                return jobs[id(each)]
        there_s = min([job.ready_s for job in self._jobs if job.ready_s > now_s])
        everybody = [_with_kv(jobs[id(each)]) for each in in_turn]
        return None if order.can_wait(everybody, now_s, there_s) else jobs[id(first)]

    def _end(self, drain_s: float) -> None:
        assert self._running is not None
        done, self._running = self._running.done, None
        # First what has ended: who comes next depends on what is known of it.
        self._later.enter(drain_s, done)
        self._on_end()
        self._next()


def _with_kv(job: Job) -> Waiting:
    """As it waits; what it fetches comes meanwhile, and not after its turn, as its promise allows for."""
    waiting = job.waiting
    assert waiting is not None
    fetch_s = 0.0 if job.life is None else job.life.placement.transfer_s
    return waiting._replace(latest_end_s=waiting.latest_end_s + fetch_s)
