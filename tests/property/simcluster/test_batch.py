"""A batch in closed form is what one gets by doing every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.slo import worst_gaps_mean
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.batch import Batch, Member
from mooncake_simulator.cluster.coupled import Chunked, PrefillFirst

MODEL = CostModel(t0_s=0.02, t1_s_per_request=0.001, t2_s_per_token=1e-6, kv_bytes_per_token=1000)
CAPACITY_TOKENS = 600

arrivals = st.lists(
    st.tuples(st.floats(0, 2, allow_nan=False), st.integers(1, 400), st.integers(1, 150)), max_size=12
)
loads = st.sampled_from([0.0, 1e6, 2e7])


@dataclass
class _Slow:
    """The same rules, step by step."""

    load_bytes_per_s: float
    most: int
    now_s: float = 0.0
    coming: list[Any] = field(default_factory=list)
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    running: dict[int, list[int]] = field(default_factory=dict)
    """Context tokens now, and tokens left; in the order in which they came in."""
    left_s: dict[int, float] = field(default_factory=dict)
    gaps_s: dict[int, list[float]] = field(default_factory=dict)
    ends_s: dict[int, float] = field(default_factory=dict)

    def run(self, asked: list[tuple[float, int, int]]) -> None:
        self.coming = sorted([(at_s, at, *rest) for at, (at_s, *rest) in enumerate(asked)])
        while self.coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now_s = max(self.now_s, self.coming[0][0])
            self._arrive()
            self._step()

    def _arrive(self) -> None:
        while self.coming and self.coming[0][0] <= self.now_s:
            self.waiting.append(self.coming.pop(0)[1:])

    def _step(self) -> None:
        marks: dict[int, float] = {}
        stalled_s = 0.0
        while self._fits():
            at, context, steps = self.waiting.pop(0)
            stall_s = 0.0
            if self.running and self.load_bytes_per_s:
                stall_s = context * MODEL.kv_bytes_per_token / self.load_bytes_per_s
            stalled_s += stall_s
            self.now_s += stall_s
            self._arrive()
            self.running[at] = [context, steps]
            self.gaps_s.setdefault(at, [])
            marks[at] = stalled_s
        while self._held() + len(self.running) > CAPACITY_TOKENS and len(self.running) > 1:
            at = list(self.running)[-1]
            context, steps = self.running.pop(at)
            if at not in marks:
                self.left_s[at] = self.now_s
            self.waiting.insert(0, (at, context, steps))
        step_s = MODEL.step_s(len(self.running), self._held())
        for at, each in list(self.running.items()):
            gap_s = step_s + stalled_s - marks.get(at, 0.0)
            if at in self.left_s:
                gap_s = self.now_s + step_s - self.left_s.pop(at)
            self.gaps_s[at].append(gap_s)
            each[0] += 1
            each[1] -= 1
            if not each[1]:
                del self.running[at]
                self.ends_s[at] = self.now_s + step_s
        self.now_s += step_s
        self._arrive()

    def _held(self) -> int:
        return sum(context for context, _ in self.running.values())

    def _fits(self) -> bool:
        if not self.waiting or not self.running:
            return bool(self.waiting)
        if self.most and len(self.running) >= self.most:
            return False
        return self._held() + len(self.running) + self.waiting[0][1] < CAPACITY_TOKENS


@settings(max_examples=200, deadline=None)
@given(arrivals, loads, st.sampled_from([0, 0, 1, 2, 3]))
def test_the_closed_form_ends_everybody_when_doing_every_step_does(
    asked: list[tuple[float, int, int]], load: float, most: int
) -> None:
    # Moments that coincide with the end of a step are decided by the last bit: keep clear of them.
    asked = [(at_s + 1e-4 * number, context, steps) for number, (at_s, context, steps) in enumerate(asked)]
    slow = _Slow(load, most)
    slow.run(asked)
    agenda = Agenda()
    batch = Batch(agenda, MODEL, CAPACITY_TOKENS, load, most)
    ended: dict[int, tuple[float, float | None]] = {}

    def done(at: int, tbt_s: float | None) -> None:
        assert at not in ended, "served twice"
        ended[at] = (agenda.now_s, tbt_s)

    for at, (at_s, context, steps) in enumerate(asked):
        member = Member(context, steps, lambda: None, partial(done, at))
        agenda.at(at_s, batch.join, member)
    agenda.run()
    assert ended.keys() == slow.ends_s.keys() == set(range(len(asked)))
    for at, (end_s, tbt_s) in ended.items():
        assert end_s == pytest.approx(slow.ends_s[at], abs=1e-7)
        assert tbt_s == pytest.approx(worst_gaps_mean(slow.gaps_s[at]), abs=1e-7)
    assert batch.most_tokens <= CAPACITY_TOKENS
    assert (batch.size, batch.context_tokens) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(arrivals, st.sampled_from([None, 16, 100]))
def test_a_coupled_engine_computes_every_prompt_and_every_answer_once(
    asked: list[tuple[float, int, int]], chunk_tokens: int | None
) -> None:
    model = CostModel(b_s_per_token=1e-4, c_s_per_token2=1e-8, t0_s=0.02, t2_s_per_token=1e-6)
    agenda = Agenda()
    batch = (
        PrefillFirst(agenda, model, CAPACITY_TOKENS)
        if chunk_tokens is None
        else Chunked(agenda, model, CAPACITY_TOKENS, chunk_tokens)
    )
    firsts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for at, (at_s, context, steps) in enumerate(asked):

        def joined(at: int = at) -> None:
            assert at not in firsts
            firsts[at] = agenda.now_s

        def done(tbt_s: float | None, at: int = at) -> None:
            assert tbt_s is not None
            assert tbt_s >= model.t0_s
            ends[at] = agenda.now_s

        agenda.at(at_s, batch.join, Member(context, steps, joined, done, cached_tokens=context // 2))
    agenda.run()
    assert firsts.keys() == ends.keys() == set(range(len(asked)))
    assert batch.most_tokens <= CAPACITY_TOKENS
    assert (batch.size, batch.context_tokens) == (0, 0)
    computed_s = 0.0
    for at, (at_s, context, steps) in enumerate(asked):
        prefill_s = model.prefill_s(context, context // 2)
        computed_s += prefill_s
        assert firsts[at] >= at_s + prefill_s - 1e-9
        assert ends[at] >= firsts[at] + steps * model.t0_s - 1e-9
    # One processor: all prompts, and at least the longest answer's steps.
    longest = max([steps for _, _, steps in asked], default=0)
    assert batch.busy_s >= computed_s + longest * model.t0_s - 1e-6


def test_chunks_let_others_decode_meanwhile_and_whole_prefills_do_not() -> None:
    model = CostModel(b_s_per_token=1e-4, t0_s=0.02)
    worst: dict[str, float] = {}
    for name in ("whole", "chunked"):
        agenda = Agenda()
        batch = (
            PrefillFirst(agenda, model, 100_000) if name == "whole" else Chunked(agenda, model, 100_000, 500)
        )

        def done(tbt_s: float | None, name: str = name) -> None:
            worst.setdefault(name, tbt_s or 0.0)

        agenda.at(0.0, batch.join, Member(100, 9, lambda: None, done))
        agenda.at(0.05, batch.join, Member(20_000, 1, lambda: None, lambda tbt_s: None))
        agenda.run()
    # The longest gap: a whole prefill of 2 s and a step; a chunk of 50 ms and a step.
    assert worst["whole"] == pytest.approx(2.02)
    assert worst["chunked"] == pytest.approx(0.07)
