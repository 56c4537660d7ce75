import pytest

from mooncake_simulator.store.directory import PUT_START_DISCARD_S, Directory
from mooncake_simulator.store.objects import Location, PutRefusal, Segment, SegmentStatus, Tier


def directory(*capacities: int, ssd: int = 0, **options: float) -> Directory:
    one = Directory(**{"lease_s": 10.0, "high_watermark": 0.9, "eviction_ratio": 0.05, **options})
    for number, capacity in enumerate(capacities):
        one.mount(Segment(f"n{number}", f"c{number}", capacity, ssd), 0.0)
    return one


def put(one: Directory, *keys: str, size: int = 10, now_s: float = 0.0) -> list[Location | PutRefusal]:
    placed = one.put_start([(key, size) for key in keys], now_s)
    one.put_end([k for k, p in zip(keys, placed, strict=True) if isinstance(p, Location)], now_s)
    return placed


def test_an_object_can_be_read_only_after_its_put_has_ended() -> None:
    one = directory(100)
    one.put_start([("a", 10)], 0.0)
    assert one.exists(["a"], 0.0) == [False]
    assert one.get(["a"], 0.0) == [None]
    assert one.put_end(["a", "b"], 1.0) == [True, False]
    assert one.get(["a"], 1.0) == [Location("n0", Tier.DRAM, 10)]


def test_objects_are_immutable() -> None:
    one = directory(100)
    put(one, "a")
    assert put(one, "a") == [PutRefusal.EXISTS]


def test_objects_spread_over_the_segments_by_how_full_they_are() -> None:
    one = directory(100, 100)
    assert {p.segment for p in put(one, "a", "b") if isinstance(p, Location)} == {"n0", "n1"}


def test_the_least_recently_used_leave_above_the_watermark_and_leased_ones_stay() -> None:
    one = directory(100)
    put(one, *"abcdefghi")
    assert one.exists(["a"], 5.0) == [True]
    put(one, "j", now_s=6.0)
    assert one.exists(["a", "b", "j"], 7.0) == [True, False, True]
    assert one.used_bytes <= 90


def test_a_put_is_refused_when_everything_is_under_lease() -> None:
    one = directory(30, high_watermark=1.0)
    put(one, *"abc")
    one.exists(["a", "b", "c"], 0.0)
    assert put(one, "d", now_s=5.0) == [PutRefusal.NO_SPACE]
    assert one.counts.alloc_failures == 1
    assert isinstance(put(one, "d", now_s=20.0)[0], Location)


def test_what_leaves_memory_goes_to_the_ssd_and_comes_back_when_it_is_read() -> None:
    one = directory(100, ssd=1000)
    put(one, *"abcdefghij")
    assert one.get(["a"], 0.0) == [Location("n0", Tier.SSD, 10)]
    assert one.counts.ssd_hits == 1
    one.evict(20.0)
    assert one.get(["a"], 20.0)[0] == Location("n0", Tier.SSD, 10)
    assert one.get(["a"], 20.0)[0] == Location("n0", Tier.DRAM, 10)
    assert one.counts.promotions_completed >= 1


def test_a_full_ssd_forgets_its_oldest() -> None:
    one = directory(100, ssd=20)
    for number in range(40):
        put(one, str(number))
    assert one.ssd_used_bytes <= 20
    assert one.exists(["0"], 0.0) == [False]


def test_what_a_silent_node_held_is_gone() -> None:
    one = directory(100, 100)
    put(one, "a", "b")
    one.heartbeat("c0", 8.0)
    assert one.expire(11.0) == ["n1"]
    assert sorted(one.exists(["a", "b"], 11.0)) == [False, True]
    assert not one.heartbeat("c1", 12.0)


def test_a_node_that_comes_back_under_its_name_is_empty() -> None:
    one = directory(100)
    put(one, "a")
    one.mount(Segment("n0", "again", 100), 1.0)
    assert one.exists(["a"], 1.0) == [False]
    assert one.used_bytes == 0


def test_puts_that_never_end_give_their_room_back() -> None:
    one = directory(100, client_ttl_s=1000)
    one.put_start([("a", 60), ("b", 10)], 0.0)
    one.put_revoke(["b"])
    assert one.used_bytes == 60
    one.expire(PUT_START_DISCARD_S + 1)
    assert one.used_bytes == 0


def test_nothing_new_is_placed_on_a_segment_that_drains() -> None:
    one = directory(100, 100)
    one.segments["n0"].status = SegmentStatus.DRAINING
    assert {p.segment for p in put(one, *"abc") if isinstance(p, Location)} == {"n1"}


def test_objects_move_only_where_there_is_room() -> None:
    one = directory(100, 10)
    one.segments["n1"].status = SegmentStatus.UNMOUNTING
    put(one, "a", "b")
    one.segments["n1"].status = SegmentStatus.OK
    assert one.move("a", ["n1"])
    assert not one.move("b", ["n1"])
    assert (one.segments["n0"].used_bytes, one.segments["n1"].used_bytes) == (10, 10)


def test_a_preferred_segment_is_used_while_it_has_room() -> None:
    one = directory(100, 15)
    placed = one.put_start([("a", 10), ("b", 10)], 0.0, preferred="n1")
    assert [p.segment for p in placed if isinstance(p, Location)] == ["n1", "n0"]


@pytest.mark.parametrize("tier", ["memory", "ssd"])
def test_removing_everything_leaves_nothing_behind(tier: str) -> None:
    one = directory(100, ssd=1000 if tier == "ssd" else 0)
    put(one, *(str(number) for number in range(15)))
    one.remove_all()
    assert (len(one), one.used_bytes, one.ssd_used_bytes) == (0, 0, 0)
