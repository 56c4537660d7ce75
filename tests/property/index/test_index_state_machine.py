"""Both implementations against a dict of sets, step by step."""

import asyncio
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from mooncake_core.index import Depth, MemoryIndex, RedisIndex, Removed, Source, Stored, Tier
from mooncake_core.registry import StaleEpochError
from mooncake_core.resp import RespClient
from mooncake_testing.redis import RedisServer

INSTANCES = ["prefill-0", "prefill-1", "decode-0", "kv"]
# Three prompts: the second shares 40 blocks with the first, the third is short. Keys spread like hashes.
_SPREAD = 0x9E3779B97F4A7C15
_FIRST = [(n + 1) * _SPREAD % 2**64 for n in range(150)]
PROMPTS = [_FIRST, _FIRST[:40] + [(n + 1000) * _SPREAD % 2**64 for n in range(90)], _FIRST[:7]]

instances = st.sampled_from(INSTANCES)
tiers = st.sampled_from(Tier)
prompts = st.sampled_from(PROMPTS)


class Model:
    """What must hold, said as simply as possible."""

    def __init__(self) -> None:
        self.epoch: dict[str, int] = {}
        self.sequence: dict[str, int] = {}
        self.tiers: dict[str, dict[int, Tier]] = {}

    def attach(self, source: Source) -> None:
        if self.epoch.get(source.instance, 0) > source.epoch:
            raise StaleEpochError
        if self.epoch.get(source.instance) != source.epoch:
            self.epoch[source.instance] = source.epoch
            self.sequence[source.instance] = -1
            self.tiers[source.instance] = defaultdict(lambda: Tier(0))

    def detach(self, source: Source) -> None:
        if self.epoch.get(source.instance) == source.epoch:
            del self.epoch[source.instance], self.tiers[source.instance]

    def apply(self, source: Source, changes: list[Stored | Removed], sequence: int) -> int:
        if self.epoch.get(source.instance) != source.epoch:
            raise StaleEpochError
        if sequence > self.sequence[source.instance]:
            self.sequence[source.instance] = sequence
            held = self.tiers[source.instance]
            for change in changes:
                for key in change.keys:
                    if isinstance(change, Stored):
                        held[key] |= change.tier
                    else:
                        held[key] &= ~change.tier
        return self.sequence[source.instance]

    def depth(self, instance: str, keys: list[int], wanted: Tier) -> int:
        held = self.tiers[instance]
        return next((n for n, key in enumerate(keys) if not held[key] & wanted), len(keys))

    def has_hole(self, instance: str, keys: list[int]) -> bool:
        held = self.tiers[instance]
        return any(
            any(held[key] & wanted for key in keys[self.depth(instance, keys, wanted) :])
            for wanted in CUMULATIVE
        )

    def match(self, keys: list[int]) -> dict[str, Depth]:
        depths = {name: Depth(*(self.depth(name, keys, w) for w in CUMULATIVE)) for name in self.tiers}
        return {name: depth for name, depth in depths.items() if depth.ssd}


CUMULATIVE = [Tier.HBM, Tier.HBM | Tier.DRAM, Tier.HBM | Tier.DRAM | Tier.SSD]


class IndexMachine(RuleBasedStateMachine):
    """Subclasses give the index and the loop it lives in."""

    loop: asyncio.AbstractEventLoop
    index: MemoryIndex | RedisIndex

    @initialize()
    def start(self) -> None:
        self.model = Model()
        self.latest = dict.fromkeys(INSTANCES, 0)

    def do(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def both(self, method: str, *args: object) -> None:
        """The index must answer, or refuse, as the model does."""
        try:
            expected = getattr(self.model, method)(*args)
        except StaleEpochError:
            with pytest.raises(StaleEpochError):
                self.do(getattr(self.index, method)(*args))
        else:
            assert self.do(getattr(self.index, method)(*args)) == expected

    @rule(instance=instances)
    def begin_a_life(self, instance: str) -> None:
        self.latest[instance] += 1
        self.both("attach", Source(instance, self.latest[instance]))

    @rule(instance=instances, behind=st.integers(0, 2))
    def attach_again_or_late(self, instance: str, behind: int) -> None:
        self.both("attach", Source(instance, max(self.latest[instance] - behind, 0)))

    @rule(instance=instances, behind=st.integers(0, 1))
    def end_a_life(self, instance: str, behind: int) -> None:
        self.both("detach", Source(instance, max(self.latest[instance] - behind, 0)))

    @rule(
        instance=instances,
        prompt=prompts,
        start=st.sampled_from([0, 0, 0, 20, 40]),
        stop=st.integers(1, 150),
        tier=tiers,
        kind=st.sampled_from([Stored, Stored, Removed]),
    )
    def change(self, instance, prompt, start, stop, tier, kind) -> None:
        sequence = self.model.sequence.get(instance, -1) + 1
        keys = prompt[start:stop]
        changes = [kind(keys, tier)]
        self.both("apply", Source(instance, self.latest[instance]), changes, sequence)

    @rule(instance=instances, prompt=prompts, keep=st.integers(0, 150), tier=tiers)
    def free_a_tail_and_store_it_in_the_next_tier(self, instance, prompt, keep, tier) -> None:
        tail = prompt[keep:]
        sequence = self.model.sequence.get(instance, -1) + 2
        changes = [Stored(tail, Tier.SSD), Removed(tail, tier), Stored(prompt[:keep], tier)]
        self.both("apply", Source(instance, self.latest[instance]), changes, sequence)

    @rule(instance=instances, prompt=prompts, back=st.integers(0, 3), tier=tiers)
    def repeat_an_old_sequence(self, instance, prompt, back, tier) -> None:
        sequence = self.model.sequence.get(instance, -1) - back
        self.both("apply", Source(instance, self.latest[instance]), [Removed(prompt, tier)], sequence)

    @rule(instance=instances, prompt=prompts)
    def write_for_an_old_life(self, instance, prompt) -> None:
        self.both("apply", Source(instance, self.latest[instance] - 1), [Stored(prompt, Tier.HBM)], 10_000)

    @rule(buckets=st.sampled_from([1, 100, 10_000]))
    def sweep(self, buckets: int) -> None:
        self.do(self.index.sweep(buckets))

    @rule(prompt=prompts, length=st.integers(0, 150))
    def ask(self, prompt, length) -> None:
        keys = prompt[:length]
        self.check(keys, self.do(self.index.match(keys)))

    @invariant()
    def every_prompt_matches(self) -> None:
        if hasattr(self, "model"):
            for keys, matched in zip(PROMPTS, self.do(self.index.match_many(PROMPTS)), strict=True):
                self.check(keys, matched)

    def check(self, keys: list[int], matched: dict[str, Depth]) -> None:
        expected = self.model.match(keys)
        assert matched.keys() == expected.keys()
        for name, depth in matched.items():
            if len(keys) <= 32 or not self.model.has_hole(name, keys):
                assert depth == expected[name]
                continue
            for found, true, wanted in zip(depth, expected[name], CUMULATIVE, strict=True):
                assert found >= true, "a hole may not hide what comes before it"
                assert found == 0 or self.model.tiers[name][keys[found - 1]] & wanted


def run(machine: type[IndexMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def test_the_index_in_memory_does_what_the_model_says(loop: asyncio.AbstractEventLoop) -> None:
    class Machine(IndexMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = loop
            self.index = MemoryIndex()

    run(Machine, 60)


def test_the_index_on_redis_does_what_the_model_says(
    loop: asyncio.AbstractEventLoop, redis_server: RedisServer
) -> None:
    client = RespClient(redis_server.url)
    loop.run_until_complete(client.connect())

    class Machine(IndexMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = loop
            self.do(client.call(b"FLUSHALL"))
            self.index = RedisIndex(client, namespace="t", timeout_s=5, write_timeout_s=5)

    run(Machine, 60)
    loop.run_until_complete(client.close())
