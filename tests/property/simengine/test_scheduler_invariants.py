"""Whatever happens to a scheduler: memory is conserved and events mirror the cache."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_simulator.engine.sequence import Sequence, State
from mooncake_simulator.engine.steps import Step
from mooncake_testing.simulated_scheduler import Mirror, scheduler, sequence

BLOCKS, SIZE = 12, 4


class Chancy:
    """A connector that sometimes has tokens, sometimes does not know yet, sometimes keeps blocks."""

    def __init__(self) -> None:
        self.external: dict[str, int | None] = {}
        self.keeps: set[str] = set()

    def matched_tokens(self, one: Sequence, local_tokens: int) -> int | None:
        asked = self.external.get(one.id, 0)
        return None if asked is None else max(0, min(asked, len(one.tokens)) - local_tokens)

    def keeps_blocks(self, one: Sequence, finish_reason: str) -> bool:
        return one.id in self.keeps and finish_reason == "length"


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.connector = Chancy()
        self.scheduler = scheduler(
            blocks=BLOCKS,
            block_size=SIZE,
            max_num_seqs=3,
            max_num_batched_tokens=7,
            max_model_len=40,
            connector=self.connector,
        )
        self.sequences: list[Sequence] = []
        self.step: Step | None = None
        self.mirror = Mirror()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        output=st.integers(1, 6),
        external=st.one_of(st.none(), st.integers(0, 20)),
        keeps=st.booleans(),
    )
    def submit(self, prompt: list[int], output: int, external: int | None, keeps: bool) -> None:
        one = sequence(f"s{len(self.sequences)}", prompt, output)
        self.connector.external[one.id] = external
        if keeps:
            self.connector.keeps.add(one.id)
        self.sequences.append(one)
        self.scheduler.add(one)

    @precondition(lambda self: self.step is None)
    @rule()
    def plan(self) -> None:
        self.step = self.scheduler.plan()

    @precondition(lambda self: self.step is not None)
    @rule()
    def complete(self) -> None:
        assert self.step is not None
        self.scheduler.complete(self.step)
        self.step = None

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.finish(data.draw(st.sampled_from(self.sequences)), "abort")

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def lookup_answered(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.sequences))
        if self.connector.external.get(one.id) is None:
            self.connector.external[one.id] = data.draw(st.integers(0, 20))

    @precondition(lambda self: self.scheduler.loading)
    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.scheduler.loading.values())))
        promised = min(self.connector.external[one.id] or 0, len(one.tokens)) - one.local_tokens
        self.connector.external[one.id] = 0
        self.scheduler.loaded(one, data.draw(st.integers(0, promised)))

    @precondition(lambda self: self.scheduler.held)
    @rule(data=st.data())
    def puller_is_done(self, data: st.DataObject) -> None:
        assert self.scheduler.release_held(data.draw(st.sampled_from(list(self.scheduler.held))))

    @rule()
    def clear_cache(self) -> None:
        self.scheduler.pool.clear()

    @invariant()
    def every_block_is_free_or_held_by_as_many_as_it_counts(self) -> None:
        holders = Counter(block for one in self.sequences for block in one.blocks)
        pool = self.scheduler.pool
        for block in range(1, BLOCKS):
            assert pool.references(block) == holders[block]
        assert pool.free_blocks == BLOCKS - 1 - len(holders)

    @invariant()
    def a_mirror_built_from_events_equals_the_cache(self) -> None:
        self.mirror.apply(self.scheduler.pool.take_events())
        assert self.mirror.hashes == set(self.scheduler.pool.cached_hashes())
        assert len(self.mirror.hashes) <= BLOCKS - 1

    @invariant()
    def limits_hold_and_nothing_is_lost(self) -> None:
        assert len(self.scheduler.running) <= 3
        if self.step is not None:
            assert sum(item.tokens for item in self.step.work) <= 7
        alive = [one for one in self.sequences if one.state is not State.FINISHED]
        loading = [one for one in self.scheduler.loading.values() if one.state is not State.FINISHED]
        known = [*self.scheduler.waiting, *self.scheduler.ready, *self.scheduler.running, *loading]
        assert sorted(one.id for one in alive) == sorted(one.id for one in known)
        for one in alive:
            assert len(one.blocks) * SIZE >= one.computed

    def teardown(self) -> None:
        """When every transfer ends and every puller comes, all that is left is served."""
        if self.step is not None:
            self.scheduler.complete(self.step)
        while self.scheduler.unfinished or self.scheduler.held:
            before = self.progress()
            for one in list(self.scheduler.loading.values()):
                self.scheduler.loaded(one, 0)
            for name in list(self.scheduler.held):
                self.scheduler.release_held(name)
            for one in self.sequences:
                self.connector.external[one.id] = 0
            self.scheduler.complete(self.scheduler.plan())
            assert self.progress() != before
        assert self.scheduler.pool.free_blocks == BLOCKS - 1

    def progress(self) -> list[int]:
        return [
            self.scheduler.unfinished,
            len(self.scheduler.held),
            *(one.computed for one in self.sequences),
        ]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
