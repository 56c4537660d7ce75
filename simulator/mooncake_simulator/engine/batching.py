"""Which sequences compute how many tokens in the next step: vLLM's V1 scheduler, as far as a router can tell.

Continuous batching with chunked prefill, first come first served; running sequences go first, the youngest is
preempted when memory is full (vLLM 0.32, `v1/core/sched/scheduler.py`). Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import deque

from mooncake_simulator.engine.hashing import BlockHasher
from mooncake_simulator.engine.pool import BlockPool, Stored
from mooncake_simulator.engine.sequence import Emission, Sequence, State
from mooncake_simulator.engine.steps import CacheCounts, Connector, Step, Work


class Scheduler:
    """Queues, running batch and block pool of one engine."""

    def __init__(
        self,
        pool: BlockPool,
        hasher: BlockHasher,
        connector: Connector,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.counts = CacheCounts()
        self.waiting: deque[Sequence] = deque()
        self.ready: deque[Sequence] = deque()
        """Sequences whose KV has arrived: they hold memory and go before those that wait for some."""
        self.running: list[Sequence] = []
        self.loading: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        """Ended sequences whose blocks the connector keeps, by id."""
        self._hasher = hasher
        self._connector = connector
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._prefix_caching = prefix_caching

    @property
    def unfinished(self) -> int:
        """Sequences that are not finished, whose client may have left."""
        return len(self.waiting) + len(self.ready) + len(self.running) + len(self.loading)

    @property
    def prefilling_tokens(self) -> int:
        """Prompt tokens of all sequences without a first token, as vLLM's API server counts them."""
        queued = [*self.waiting, *self.ready, *self.loading.values(), *self.running]
        return sum(sequence.prompt_tokens for sequence in queued if not sequence.output_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._hasher.extend(sequence.names, sequence.tokens, sequence.salt, len(sequence.tokens))
        self.waiting.append(sequence)

    def plan(self) -> Step:
        """Choose the next step's work; allocates blocks, preempts where memory is short."""
        step = Step()
        budget = self._max_num_batched_tokens
        budget, preempted = self._plan_running(step, budget)
        if not preempted:
            budget = self._plan_ready(step, budget)
            if not self.ready:
                self._plan_waiting(step, budget)
        if not step.work and self.ready and not self.loading:
            # They hold each other's memory: the youngest gives way and computes its prompt itself.
            self._preempt(self.ready.pop())
            return self.plan()
        return step

    def complete(self, step: Step) -> list[Emission]:
        """Account for a step that has been computed; returns the tokens it gave."""
        emissions = []
        for item in step.work:
            sequence = item.sequence
            if sequence.state is not State.RUNNING:
                continue
            sequence.computed += item.tokens
            self._store_full_blocks(sequence)
            if sequence.computed == len(sequence.tokens):
                emissions.append(self._sample(sequence))
        return emissions

    def loaded(self, sequence: Sequence, external_tokens: int) -> None:
        """KV has arrived (0 tokens: it has not, they are computed here instead)."""
        del self.loading[sequence.id]
        if sequence.state is State.FINISHED:
            self._free(sequence)
            return
        sequence.computed = sequence.local_tokens + external_tokens
        sequence.external_tokens = external_tokens
        sequence.cached_tokens = min(sequence.cached_tokens, sequence.computed)
        self._store_full_blocks(sequence)
        # The last token's logits are needed: it is computed even when its KV is there.
        sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)
        sequence.state = State.READY
        self.ready.append(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence from outside (abort, stop string, failed load); twice changes nothing."""
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.READY:
            self.ready.remove(sequence)
        loading = sequence.state is State.LOADING
        sequence.state = State.FINISHED
        # Blocks that KV is still flowing into cannot be given to another: `loaded` frees them.
        if not loading:
            self._end(sequence, reason)

    def release_held(self, sequence_id: str) -> bool:
        """Free the blocks that the connector kept; False when there are none (any more)."""
        sequence = self.held.pop(sequence_id, None)
        if sequence is None:
            return False
        self._free(sequence)
        return True

    def _plan_running(self, step: Step, budget: int) -> tuple[int, bool]:
        index = 0
        preempted = False
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(len(sequence.tokens) - sequence.computed, budget)
            while not self._reserve(sequence, sequence.computed + tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    return budget, True
            step.work.append(Work(sequence, tokens, decode=sequence.output_tokens > 0 or sequence.received))
            budget -= tokens
            index += 1
        return budget, preempted

    def _plan_ready(self, step: Step, budget: int) -> int:
        while self.ready and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.ready[0]
            tokens = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._reserve(sequence, sequence.computed + tokens):
                break
            self._start(step, self.ready.popleft(), tokens)
            budget -= tokens
        return budget

    def _plan_waiting(self, step: Step, budget: int) -> None:
        deferred: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            external = self._admit(sequence)
            if external is None:
                deferred.append(self.waiting.popleft())
            elif external < 0:
                break
            elif external:
                self.waiting.popleft()
                sequence.state = State.LOADING
                self.loading[sequence.id] = sequence
                step.loads.append(sequence)
            else:
                tokens = min(len(sequence.tokens) - sequence.computed, budget)
                if not self._reserve(sequence, sequence.computed + tokens):
                    self._return_to_waiting(sequence)
                    break
                self._count(sequence, sequence.local_tokens, 0)
                self._start(step, self.waiting.popleft(), tokens)
                budget -= tokens
        self.waiting.extendleft(reversed(deferred))

    def _start(self, step: Step, sequence: Sequence, tokens: int) -> None:
        sequence.state = State.RUNNING
        self.running.append(sequence)
        step.work.append(Work(sequence, tokens, decode=sequence.received))

    def _admit(self, sequence: Sequence) -> int | None:
        """Take the cached prefix and, for external tokens, their blocks.

        Returns how many tokens come from outside; None when that is not known yet; -1 when memory is short.
        """
        size = self._hasher.block_size_tokens
        usable = (len(sequence.tokens) - 1) // size
        hit = self.pool.match(sequence.names.hashes[:usable])
        local = len(hit) * size
        external = self._connector.matched_tokens(sequence, local)
        if external is None:
            return None
        wanted = -(-(local + external) // size) - len(hit) if external else 1
        if wanted > self.pool.free_blocks - self.pool.idle_among(hit):
            return -1
        self.pool.take(hit)
        sequence.blocks = hit
        sequence.local_tokens = sequence.computed = local
        sequence.stored = len(hit)
        if external:
            sequence.blocks += self.pool.allocate(wanted)
            self._count(sequence, local, external)
        return external

    def _count(self, sequence: Sequence, local: int, external: int) -> None:
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = local + external
            self.counts.queries += len(sequence.tokens)
            self.counts.hits += local
            self.counts.external_queries += len(sequence.tokens) - local
            self.counts.external_hits += external

    def _return_to_waiting(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.computed = sequence.stored = 0

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.computed = sequence.stored = 0
        sequence.received = False
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(sequence)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        missing = -(-tokens // self._hasher.block_size_tokens) - len(sequence.blocks)
        if missing > self.pool.free_blocks:
            return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _store_full_blocks(self, sequence: Sequence) -> None:
        size = self._hasher.block_size_tokens
        full = sequence.computed // size
        if full <= sequence.stored or not self._prefix_caching:
            return
        self._hasher.extend(sequence.names, sequence.tokens, sequence.salt, full * size)
        run_start = sequence.stored
        for index in range(sequence.stored, full):
            names = sequence.names
            if not self.pool.store(sequence.blocks[index], names.hashes[index], names.keys[index]):
                self._announce(sequence, run_start, index)
                run_start = index + 1
        self._announce(sequence, run_start, full)
        sequence.stored = full

    def _announce(self, sequence: Sequence, start: int, end: int) -> None:
        if start >= end:
            return
        size = self._hasher.block_size_tokens
        self.pool.events.append(
            Stored(
                hashes=tuple(sequence.names.hashes[start:end]),
                parent=sequence.names.hashes[start - 1] if start else None,
                tokens=tuple(sequence.tokens[start * size : end * size]),
                salt=sequence.salt if start == 0 else None,
            )
        )

    def _sample(self, sequence: Sequence) -> Emission:
        limits = sequence.limits
        token = sequence.next_token(sequence.output_tokens)
        sequence.tokens.append(token)
        generated = sequence.output_tokens
        reason: str | None = None
        stop_reason: int | None = None
        if generated >= limits.min_tokens:
            if token in limits.stop_tokens:
                reason, stop_reason = "stop", token
            elif token == limits.eos_token and not limits.ignore_eos:
                reason = "stop"
        if reason is None and (generated >= limits.max_tokens or len(sequence.tokens) >= self._max_model_len):
            reason = "length"
        if reason is not None:
            self.running.remove(sequence)
            sequence.state = State.FINISHED
            self._end(sequence, reason)
        return Emission(sequence, token, reason, stop_reason)

    def _end(self, sequence: Sequence, reason: str) -> None:
        if sequence.blocks and self._connector.keeps_blocks(sequence, reason):
            self.held[sequence.id] = sequence
        else:
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
