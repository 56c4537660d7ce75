"""The queue of one prefill instance: one prompt after the other, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake_core.ledger import Waiting
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.series import Series

if TYPE_CHECKING:
    from mooncake_simulator.cluster.life import Life


class Job:
    """One prompt in a queue.

    Args:
        ready_s: when the KV that is fetched for it has arrived.
        begin: called when its turn comes; returns the seconds until the next can begin, and those that later
            stages of a pipeline take from then on (0 without stages).
        done: called when it is computed.
        waiting: what the order of turns goes by, where there is one.
        life: whose prompt it is, where it may be bound to another instance while it waits.
    """

    __slots__ = ("begin", "done", "life", "ready_s", "waiting")

    def __init__(
        self,
        ready_s: float,
        begin: Callable[[], tuple[float, float]],
        done: Callable[[], None],
        waiting: Waiting | None = None,
        life: Life | None = None,
    ) -> None:
        self.ready_s = ready_s
        self.begin = begin
        self.done = done
        self.waiting = waiting
        self.life = life


class LaterStages:
    """What follows the first stage of a pipeline: the next prompt begins meanwhile, and none overtakes.

    Args:
        agenda: the time.
    """

    __slots__ = ("_agenda", "_free_s")

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._free_s = 0.0

    def enter(self, drain_s: float, done: Callable[[], None]) -> None:
        """A prompt leaves the first stage: `done` once the last one is through, at once without stages."""
        now_s = self._agenda.now_s
        self._free_s = max(self._free_s, now_s + drain_s)
        if self._free_s > now_s:
            self._agenda.at(self._free_s, done)
        else:
            done()


class OneAtATime:
    """An instance that computes prompts one after the other, and the seconds that it does.

    Args:
        agenda: the time.
        busy: where the seconds of computing are added up over time.
    """

    def __init__(self, agenda: Agenda, busy: Series | None = None) -> None:
        self._agenda = agenda
        self._busy = busy or Series()
        self._running: Job | None = None
        self._until_s = 0.0
        self._later = LaterStages(agenda)
        self.busy_s = 0.0

    def _compute(self, job: Job) -> None:
        """Begin; `_end` is called when the next one can."""
        self._running = job
        seconds, drain_s = job.begin()
        now_s = self._agenda.now_s
        self._until_s = now_s + seconds
        self.busy_s += seconds
        self._busy.add(now_s, self._until_s)
        self._agenda.at(self._until_s, self._end, drain_s)

    def _end(self, drain_s: float) -> None:
        raise NotImplementedError

    def die(self) -> None:
        """The instance is gone: what it was computing is not computed any further."""
        now_s = self._agenda.now_s
        left_s = self._until_s - now_s
        if left_s > 0:
            self.busy_s -= left_s
            self._busy.add(now_s, self._until_s, -1.0)
        # What it still does goes on unseen.
        self._busy = Series()


class PrefillQueue(OneAtATime):
    """What waits at a prefill instance, and what it computes: first come, first served.

    Args:
        agenda: the time.
        busy: where the seconds of computing are added up over time.
    """

    def __init__(self, agenda: Agenda, busy: Series | None = None) -> None:
        super().__init__(agenda, busy)
        self._waiting: deque[Job] = deque()

    @property
    def occupied(self) -> bool:
        """Whether it computes, or somebody waits."""
        return self._running is not None or bool(self._waiting)

    def add(self, job: Job) -> None:
        """Put a job at the end."""
        self._waiting.append(job)
        if self._running is None:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._running = None
            return
        job = self._running = self._waiting.popleft()
        self._agenda.at(job.ready_s, self._compute, job)

    def _end(self, drain_s: float) -> None:
        assert self._running is not None
        done = self._running.done
        self._next()
        self._later.enter(drain_s, done)
