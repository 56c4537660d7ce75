"""Engines that prefill and decode in one batch: what disaggregation is compared with."""

from __future__ import annotations

from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.batch import Batch, Member


class PrefillFirst(Batch):
    """vLLM V0: a prompt that waits is computed whole before the next decode step; all others wait."""

    def _stall_s(self, member: Member) -> float:
        return self._model.prefill_s(member.prompt_tokens, member.cached_tokens)


class Chunked(Batch):
    """Sarathi: each step decodes everybody's next token and computes a chunk of one waiting prompt.

    A step then takes what the decode step and the chunk take one after the other.

    Args:
        agenda: the time.
        model: what steps and chunks take.
        kv_capacity_tokens: KV that fits.
        chunk_tokens: of a prompt a step.
    """

    def __init__(self, agenda: Agenda, model: CostModel, kv_capacity_tokens: int, chunk_tokens: int) -> None:
        super().__init__(agenda, model, kv_capacity_tokens)
        self._chunk_tokens = chunk_tokens
        self._filling: Member | None = None
        self._filled_tokens = 0
        self._in_run_tokens = 0

    def _let_in(self) -> None:
        member = self._filling
        if member is not None:
            self._filled_tokens += self._in_run_tokens
            self._in_run_tokens = 0
            if self._filled_tokens >= member.prompt_tokens:
                self._filling = None
                self.context_tokens -= member.prompt_tokens
                self._enter(member)
        if self._filling is None and self._may_enter():
            self._filling = self._take()
            # Its memory is set aside while it is computed.
            self.context_tokens += self._filling.prompt_tokens
            # The last token is always computed.
            self._filled_tokens = min(self._filling.cached_tokens, self._filling.prompt_tokens - 1)
        self._start_run()

    def _may_enter(self) -> bool:
        return self._filling is None and super()._may_enter()

    def _start_run(self) -> None:
        member = self._filling
        if member is None:
            super()._start_run()
            return
        self._make_room()
        if self.size and self._room_tokens() < 0:
            # Who decodes goes first: the prompt gives its memory back and begins anew.
            self._filling = None
            self.context_tokens -= member.prompt_tokens
            self._waiting.appendleft(member)
            self._waiting_tokens += member.prompt_tokens
            super()._start_run()
            return
        whole, rest = divmod(member.prompt_tokens - self._filled_tokens, self._chunk_tokens)
        tokens = self._chunk_tokens if whole else rest
        steps = whole or 1
        model, size, done = self._model, self.size, self._filled_tokens
        if size:
            steps = min(steps, self._steps_ahead())
        chunk_s = model.prefill_s(done + tokens, done) - model.a_s
        decode_s = model.step_s(size, self.context_tokens) if size else 0.0
        growth_s = model.t2_s_per_token * size + 2 * model.c_s_per_token2 * tokens * tokens
        self._in_run_tokens = steps * tokens
        self._run(decode_s + chunk_s, growth_s, steps)

    def _cut(self) -> None:
        # A prompt that comes waits for the one that is being computed, and that needs no end of the run.
        if self._filling is None:
            super()._cut()
