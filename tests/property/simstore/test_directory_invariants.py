"""Whatever is put, read, evicted and lost: the store never holds more than it has room for."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.objects import Location, Segment, Tier

KEYS = st.sampled_from([f"k{number}" for number in range(12)])
NAMES = st.sampled_from(["n0", "n1", "n2"])


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(lease_s=3, client_ttl_s=10, eviction_ratio=0.1)
        self.now_s = 0.0

    @rule(name=NAMES, capacity=st.integers(10, 60), ssd=st.sampled_from([0, 15, 80]))
    def mount(self, name: str, capacity: int, ssd: int) -> None:
        self.directory.mount(Segment(name, f"client-{name}", capacity, ssd), self.now_s)

    @rule(name=NAMES)
    def unmount(self, name: str) -> None:
        self.directory.unmount(name)

    @rule(name=NAMES)
    def beat(self, name: str) -> None:
        self.directory.heartbeat(f"client-{name}", self.now_s)

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.directory.expire(self.now_s)

    @rule(key=KEYS, size=st.integers(1, 20), ends=st.booleans())
    def put(self, key: str, size: int, ends: bool) -> None:
        placed = self.directory.put_start([(key, size)], self.now_s)
        if ends and isinstance(placed[0], Location):
            assert self.directory.put_end([key], self.now_s) == [True]

    @rule(key=KEYS)
    def revoke(self, key: str) -> None:
        self.directory.put_revoke([key])

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        there = self.directory.exists([key], self.now_s)
        found = self.directory.get([key], self.now_s)
        assert there == [found[0] is not None]
        if found[0] is not None:
            assert found[0].segment in self.directory.segments

    @rule(key=KEYS, name=NAMES)
    def move(self, key: str, name: str) -> None:
        self.directory.move(key, [name])

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.directory.remove(key)

    @rule()
    def evict(self) -> None:
        self.directory.evict(self.now_s)

    @invariant()
    def no_segment_holds_more_than_it_has_and_its_counts_are_those_of_its_objects(self) -> None:
        for segment in self.directory.segments.values():
            held = self.directory.objects_in(segment.name)
            assert segment.used_bytes == sum(o.size_bytes for o in held if o.tier is Tier.DRAM)
            assert segment.ssd_used_bytes == sum(o.size_bytes for o in held if o.tier is Tier.SSD)
            assert segment.used_bytes <= segment.capacity_bytes
            assert segment.ssd_used_bytes <= segment.ssd_capacity_bytes

    @invariant()
    def every_object_lies_in_a_mounted_segment(self) -> None:
        held = sum(len(self.directory.objects_in(name)) for name in self.directory.segments)
        assert held == len(self.directory)


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
