"""Whatever is put, read, evicted and lost: the store never holds more than it has room for."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.objects import Location, Segment, Tier
from mooncake_simulator.store.promotions import PromotionRules

ALL_KEYS = [f"k{number}" for number in range(12)]
KEYS = st.sampled_from(ALL_KEYS)
NAMES = st.sampled_from(["n0", "n1", "n2"])


class StoreMachine(RuleBasedStateMachine):
    """What holds in every store."""

    def __init__(self) -> None:
        super().__init__()
        rules = PromotionRules(on_hit=True, admission_threshold=1, max_per_heartbeat=3)
        self.directory = Directory(lease_s=3, client_ttl_s=10, eviction_ratio=0.1, promotion=rules)
        self.now_s = 0.0

    @invariant()
    def no_segment_holds_more_than_it_has_and_its_counts_are_those_of_its_objects(self) -> None:
        for segment in self.directory.segments.values():
            held = self.directory.objects_in(segment.name)
            set_aside = self.directory.promotions.carried_bytes(segment.name)
            in_memory = sum(o.size_bytes for o in held if o.tier is Tier.DRAM)
            assert segment.used_bytes == in_memory + set_aside
            assert segment.ssd_used_bytes == sum(o.size_bytes for o in held if o.tier is Tier.SSD)
            assert segment.used_bytes <= segment.capacity_bytes
            assert segment.ssd_used_bytes <= segment.ssd_capacity_bytes

    @invariant()
    def what_is_on_its_way_is_there_and_on_ssd_and_every_promotion_ends_in_one_way(self) -> None:
        directory, counts = self.directory, self.directory.counts
        for segment in directory.segments:
            on_ssd = {o.key: o for o in directory.objects_in(segment) if o.tier is Tier.SSD}
            carried = [stored for stored in on_ssd.values() if directory.promotions.is_carried(stored)]
            assert sum(o.size_bytes for o in carried) == directory.promotions.carried_bytes(segment)
        ended = counts.promotions_completed + counts.promotions_failed + counts.promotions_cancelled
        assert counts.promotions_admitted == ended + directory.promotions.in_flight

    @invariant()
    def every_object_lies_in_a_mounted_segment(self) -> None:
        held = sum(len(self.directory.objects_in(name)) for name in self.directory.segments)
        assert held == len(self.directory)


class DirectoryMachine(StoreMachine):
    """Anything may happen to a store that begins empty."""

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


class PromotionMachine(StoreMachine):
    """Begins with all keys on SSD, from where lookups bring them back while they are read, moved and lost."""

    @initialize(sizes=st.lists(st.integers(1, 20), min_size=12, max_size=12))
    def everything_is_on_ssd(self, sizes: list[int]) -> None:
        for number, name in enumerate(("n0", "n1")):
            self.directory.mount(Segment(name, f"client-{name}", 60, 120), self.now_s)
            for key, size in list(zip(ALL_KEYS, sizes, strict=True))[number::2]:
                self.directory.put_start([(key, size)], self.now_s, preferred=name)
                self.directory.put_end([key], self.now_s)
                self.directory.evict(self.now_s)
        assert self.directory.tier_counts() == (0, len(ALL_KEYS))

    @rule(keys=st.lists(KEYS, min_size=3, max_size=8))
    def look_up(self, keys: list[str]) -> None:
        places = self.directory.lookup(keys, self.now_s)
        assert [place is not None for place in places] == self.directory.exists(keys, self.now_s)

    @rule(name=NAMES)
    def fetch(self, name: str) -> None:
        taken = self.directory.take_promotions(f"client-{name}")
        assert len(taken) <= 3
        assert all(stored.tier is Tier.SSD and stored.segment == name for stored in taken)

    @rule(name=NAMES)
    def fetch_and_carry_some(self, name: str) -> None:
        before = self.directory.counts.promotions_completed
        keys = [stored.key for stored in self.directory.take_promotions(f"client-{name}")][:2]
        assert all(self.directory.end_promotions(f"client-{name}", [*keys], self.now_s))
        assert self.directory.counts.promotions_completed == before + len(keys)

    @rule(name=NAMES)
    def carry_what_was_never_asked_for(self, name: str) -> None:
        arrived = self.directory.end_promotions(f"client-{name}", ALL_KEYS, self.now_s)
        assert not self.directory.promotions.carried_bytes(name)
        assert arrived.count(True) <= 3

    @rule(key=KEYS)
    def read(self, key: str) -> None:
        self.directory.get([key], self.now_s)

    @rule(key=KEYS, name=NAMES)
    def move(self, key: str, name: str) -> None:
        self.directory.move(key, [name])

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        self.directory.remove(key)

    @rule(name=st.sampled_from(["n0", "n1"]))
    def restart(self, name: str) -> None:
        self.directory.mount(Segment(name, f"client-{name}", 60, 120), self.now_s)

    @rule(seconds=st.floats(0, 5))
    def time_passes_and_some_leave_dram(self, seconds: float) -> None:
        self.now_s += seconds
        self.directory.evict(self.now_s)


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPromotions = PromotionMachine.TestCase
TestPromotions.settings = TestDirectory.settings
