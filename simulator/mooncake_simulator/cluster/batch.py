"""Continuous batching: every step of an instance that decodes, without an event for each.

Between two changes of a batch its steps grow evenly (each adds one token of KV a request), so a run of steps
is a sum in closed form: an event is needed only where somebody joins or leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import ceil, sqrt

from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.gaps import Run, worst_gaps_mean_of
from mooncake_simulator.cluster.series import Series

_RUNS_KEPT = 512


class Member:
    """A request in a batch, or waiting for it.

    Args:
        prompt_tokens: KV that it comes with, or computes first where the instance prefills itself.
        steps: tokens that it decodes here, at least 1.
        joined: called when it is in the batch.
        done: called with its time between tokens once its last token has come.
        cached_tokens: of the prompt, those that need no computing where the instance prefills itself.
    """

    __slots__ = (
        "before", "cached_tokens", "done", "entered", "joined", "left_s", "mark_s", "prompt_tokens", "since",
        "steps",
    )  # fmt: skip

    def __init__(
        self,
        prompt_tokens: int,
        steps: int,
        joined: Callable[[], None],
        done: Callable[[float | None], None],
        cached_tokens: int = 0,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.steps = steps
        self.joined = joined
        self.done = done
        self.entered = False
        self.before: list[Run] = []
        """What it went through that is not among the batch's runs since it came in."""
        self.left_s: float | None = None
        """When it was put off."""
        self.mark_s = 0.0
        """What the batch had waited when it came in."""
        self.since = 0


class Batch:
    """The running batch of one decode instance.

    KV memory fills as answers grow, and is never exceeded: where a step would not fit, who came last is put
    off with its KV swapped out, and comes in again first (vLLM's preemption). A request that does not fit
    waits, first come, first served. While a joiner's KV comes in, the others wait (the join stall, FAST'25
    Fig. 15); the joiner itself does not count that as a gap between its tokens.

    Args:
        agenda: the time.
        model: what a step takes.
        kv_capacity_tokens: KV that fits.
        load_bytes_per_s: rate at which a joiner's KV comes in; 0 = at once.
        most: requests at once; 0 = as many as memory holds.
    """

    def __init__(
        self,
        agenda: Agenda,
        model: CostModel,
        kv_capacity_tokens: int,
        load_bytes_per_s: float = 0.0,
        most: int = 0,
    ) -> None:
        self._agenda = agenda
        self._model = model
        self._capacity_tokens = kv_capacity_tokens
        self._load_bytes_per_s = load_bytes_per_s
        self._most = most
        self._waiting: deque[Member] = deque()
        self._waiting_tokens = 0
        self._leaving: list[tuple[int, int, Member]] = []
        self._fresh: list[Member] = []
        self._order = 0
        self._steps = 0
        self._stalled_s = 0.0
        """What those who decode have waited since the last step."""
        self._runs: list[Run] = []
        self._dropped_runs = 0
        self._idle = True
        self._plan = 0
        self._planned = 0
        """Steps of the run that goes on; 0 while somebody comes in."""
        self._began_s = self._gap_s = self._growth_s = 0.0
        self.context_tokens = 0
        """KV that is held."""
        self.most_tokens = 0
        """The most that ever was."""
        self.put_off = 0
        """How often somebody had to leave for want of memory."""
        self.busy_s = 0.0
        self.busy = Series()
        """Seconds of steps and stalls, over time."""
        self.kv_tokens = Series()
        """KV held, over time."""

    @property
    def size(self) -> int:
        """Requests in the batch."""
        return len(self._leaving)

    def carry_on(self, before: Batch) -> None:
        """Count on from another one's figures: it was this instance's before it died."""
        self.most_tokens, self.put_off, self.busy_s = before.most_tokens, before.put_off, before.busy_s

    def fits(self, tokens: int) -> bool:
        """Whether a request with so much KV has room beside those that are here and those that wait."""
        if self._most and self.size + len(self._waiting) >= self._most:
            return False
        return tokens + self._waiting_tokens <= self._room_tokens()

    def ever_fits(self, member: Member) -> bool:
        """Whether its prompt and its whole answer have room in an empty memory."""
        return member.prompt_tokens + member.steps <= self._capacity_tokens

    def join(self, member: Member) -> None:
        """Join at the end of the step that runs, as soon as there is room.

        Raises:
            ValueError: it will never fit.
        """
        if not self.ever_fits(member):
            raise ValueError(
                f"{member.prompt_tokens + member.steps} tokens never fit into a memory for "
                f"{self._capacity_tokens}: refuse the request"
            )
        self._waiting.append(member)
        self._waiting_tokens += member.prompt_tokens
        if self._idle:
            self._idle = False
            self._let_in()
        elif self._planned > 1 and self._may_enter():
            self._cut()

    def _room_tokens(self) -> int:
        """KV that fits beside the next step."""
        return self._capacity_tokens - self.context_tokens - self.size

    def _stall_s(self, member: Member) -> float:
        """Seconds from a member's turn until it is in; the others wait meanwhile."""
        if not self._load_bytes_per_s or not self._leaving:
            return 0.0
        return member.prompt_tokens * self._model.kv_bytes_per_token / self._load_bytes_per_s

    def _may_enter(self) -> bool:
        if not self._waiting:
            return False
        size = len(self._leaving)
        if not size:
            return True
        return (not self._most or size < self._most) and (
            self._waiting[0].prompt_tokens < self._room_tokens()
        )

    def _take(self) -> Member:
        """The next of those who wait."""
        member = self._waiting.popleft()
        self._waiting_tokens -= member.prompt_tokens
        return member

    def _let_in(self) -> None:
        """Let in who fits, one after the other, then step on."""
        while self._may_enter():
            member = self._take()
            stall_s = self._stall_s(member)
            if stall_s:
                self._stalled_s += stall_s
                self.busy_s += stall_s
                self._record(self._agenda.now_s, stall_s, self.context_tokens)
                self._agenda.at(self._agenda.now_s + stall_s, self._entered, member)
                return
            self._enter(member)
        self._start_run()

    def _entered(self, member: Member) -> None:
        self._enter(member)
        self._let_in()

    def _enter(self, member: Member) -> None:
        self._order += 1
        self.context_tokens += member.prompt_tokens
        heappush(self._leaving, (self._steps + member.steps, self._order, member))
        member.mark_s = self._stalled_s
        self._fresh.append(member)
        if not member.entered:
            member.entered = True
            member.joined()

    def _start_run(self) -> None:
        """Step on until the first of the batch leaves."""
        if not self._leaving:
            self._idle = True
            self._stalled_s = 0.0
            return
        self._make_room()
        size = self.size
        gap_s = self._model.step_s(size, self.context_tokens)
        # Who waited counts the wait as part of the gap: that first step is a run of its own.
        steps = 1 if self._stalled_s else self._steps_ahead()
        self._run(gap_s, self._model.t2_s_per_token * size, steps)

    def _steps_ahead(self) -> int:
        """Steps until the first leaves or memory is full."""
        fit = (self._capacity_tokens - self.context_tokens) // self.size
        return min(self._leaving[0][0] - self._steps, fit)

    def _make_room(self) -> None:
        """Put off who came last until the next step fits."""
        leaving = self._leaving
        while self._room_tokens() < 0 and self.size > 1:
            at = max(range(len(leaving)), key=lambda each: leaving[each][1])
            until, _, member = leaving.pop(at)
            heapify(leaving)
            if member in self._fresh:
                self._fresh.remove(member)
            else:
                member.before = self._lived_through(member)
                member.left_s = self._agenda.now_s
            left = until - self._steps
            member.prompt_tokens += member.steps - left
            member.steps = left
            self.context_tokens -= member.prompt_tokens
            self._waiting.appendleft(member)
            self._waiting_tokens += member.prompt_tokens
            self.put_off += 1

    def _run(self, gap_s: float, growth_s: float, steps: int) -> None:
        self._began_s, self._gap_s, self._growth_s = self._agenda.now_s, gap_s, growth_s
        self._schedule(steps)

    def _schedule(self, steps: int) -> None:
        self._planned = steps
        self._plan += 1
        end_s = self._began_s + _run_s(steps, self._gap_s, self._growth_s)
        self._agenda.at(end_s, self._end_run, self._plan)

    def _cut(self) -> None:
        """End the run with the step that runs now."""
        steps = max(1, _steps_until(self._agenda.now_s - self._began_s, self._gap_s, self._growth_s))
        if steps < self._planned:
            self._schedule(steps)

    def _end_run(self, plan: int) -> None:
        if plan != self._plan:
            return
        steps, self._planned = self._planned, 0
        self._note(steps)
        self._steps += steps
        self.context_tokens += steps * self.size
        self.most_tokens = max(self.most_tokens, self.context_tokens)
        leaving = self._leaving
        while leaving and leaving[0][0] <= self._steps:
            member = heappop(leaving)[2]
            self.context_tokens -= member.prompt_tokens + member.steps
            member.done(worst_gaps_mean_of(self._lived_through(member)))
        self._trim()
        self._let_in()

    def _note(self, steps: int) -> None:
        """Write the gaps of a run down: those of newcomers begin when they came in."""
        here = self._dropped_runs + len(self._runs)
        own_run = bool(self._stalled_s) or any(member.left_s is not None for member in self._fresh)
        for member in self._fresh:
            member.since = here + own_run
            if own_run:
                gap_s = self._stalled_s - member.mark_s + self._gap_s
                if member.left_s is not None:
                    gap_s = self._began_s + self._gap_s - member.left_s
                    member.left_s = None
                member.before.append(Run(gap_s, 0.0, 1))
        if own_run:
            self._runs.append(Run(self._stalled_s + self._gap_s, 0.0, 1))
            if steps > 1:
                self._runs.append(Run(self._gap_s + self._growth_s, self._growth_s, steps - 1))
            self._stalled_s = 0.0
        else:
            self._runs.append(Run(self._gap_s, self._growth_s, steps))
        self._fresh.clear()
        run_s = _run_s(steps, self._gap_s, self._growth_s)
        self.busy_s += run_s
        self._record(self._began_s, run_s, self.context_tokens + steps * self.size / 2)

    def _record(self, began_s: float, took_s: float, tokens: float) -> None:
        self.busy.add(began_s, began_s + took_s)
        self.kv_tokens.add(began_s, began_s + took_s, tokens)

    def _lived_through(self, member: Member) -> list[Run]:
        return member.before + self._runs[member.since - self._dropped_runs :]

    def _trim(self) -> None:
        """Forget the runs that nobody here lived through: memory stays flat."""
        if len(self._runs) < _RUNS_KEPT:
            return
        end = self._dropped_runs + len(self._runs)
        oldest = min([member.since for _, _, member in self._leaving], default=end)
        if oldest - self._dropped_runs > _RUNS_KEPT // 2:
            del self._runs[: oldest - self._dropped_runs]
            self._dropped_runs = oldest


def _run_s(steps: int, gap_s: float, growth_s: float) -> float:
    return steps * gap_s + growth_s * (steps * (steps - 1) / 2)


def _steps_until(into_s: float, gap_s: float, growth_s: float) -> int:
    """The number of the step, counted from 1, that runs or ends `into_s` after the first began."""
    if growth_s <= 0:
        return ceil(into_s / gap_s - 1e-9)
    half = gap_s / growth_s - 0.5
    return ceil(sqrt(half * half + 2 * into_s / growth_s) - half - 1e-9)
