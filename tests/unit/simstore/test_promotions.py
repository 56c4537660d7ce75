"""Lookups that bring objects from SSD to DRAM: what a master of Mooncake 0.3.13 did when it was tried."""

import subprocess
import sys

from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.objects import Location, Segment, SegmentStatus, Tier
from mooncake_simulator.store.promotions import PromotionRules
from mooncake_simulator.store.sketch import DECAY_AFTER, LookupCounts

ON_SSD = Location("n0", Tier.SSD, 10)
IN_DRAM = Location("n0", Tier.DRAM, 10)


def store(on_ssd: str = "ab", capacity: int = 100, at_once: int = 16, threshold: int = 2) -> Directory:
    """One node whose DRAM is empty and whose SSD holds these keys, of 10 bytes each."""
    rules = PromotionRules(on_hit=True, admission_threshold=threshold, max_per_heartbeat=at_once)
    one = Directory(lease_s=10.0, promotion=rules)
    one.mount(Segment("n0", "c0", capacity, 1000), 0.0)
    for key in on_ssd:
        one.put_start([(key, 10)], 0.0)
        one.put_end([key], 0.0)
        one.evict(0.0)
    assert one.used_bytes == 0
    return one


def carry(one: Directory, now_s: float = 1.0) -> list[str]:
    """What its node does with one heartbeat."""
    keys = [stored.key for stored in one.take_promotions("c0")]
    assert all(one.end_promotions("c0", keys, now_s))
    return keys


def test_the_second_lookup_of_a_key_on_ssd_admits_it_and_its_node_brings_it_to_dram() -> None:
    one = store()
    assert one.lookup(["a"], 0.0) == [ON_SSD]
    assert one.take_promotions("c0") == []
    assert (one.counts.promotions_too_early, one.counts.promotions_admitted) == (1, 0)
    assert one.lookup(["a"], 1.0) == [ON_SSD]
    assert (one.counts.promotions_admitted, one.promotions.in_flight) == (1, 1)
    (taken,) = one.take_promotions("c0")
    assert one.lookup(["a"], 1.5) == [ON_SSD]
    assert one.end_promotions("c0", [taken.key], 2.0) == [True]
    assert one.lookup(["a", "b"], 2.0) == [IN_DRAM, ON_SSD]
    assert (one.used_bytes, one.ssd_used_bytes, one.promotions.in_flight) == (10, 10, 0)
    assert (one.counts.promotions_completed, one.counts.promoted_bytes) == (1, 10)


def test_without_the_flag_lookups_bring_nothing() -> None:
    one = Directory()
    one.mount(Segment("n0", "c0", 100, 1000), 0.0)
    one.put_start([("a", 10)], 0.0)
    one.put_end(["a"], 0.0)
    one.evict(0.0)
    for _ in range(5):
        assert one.lookup(["a"], 0.0) == [ON_SSD]
    assert one.take_promotions("c0") == []


def test_lookups_take_a_lease_and_existence_checks_are_not_lookups() -> None:
    one = store()
    for _ in range(5):
        one.exists(["a"], 0.0)
    assert one.take_promotions("c0") == []
    one.lookup(["b", "none"], 5.0)
    stored = one.peek("b")
    assert stored is not None
    assert stored.lease_until_s == 15.0


def test_what_was_looked_up_often_and_left_dram_again_comes_with_the_next_lookup() -> None:
    one = store()
    one.lookup(["a", "a"], 0.0)
    assert carry(one) == ["a"]
    one.evict(100.0)
    assert one.lookup(["a"], 100.0) == [ON_SSD]
    assert carry(one) == ["a"]


def test_a_node_gets_as_many_as_the_flag_says_and_the_rest_with_its_next_heartbeats() -> None:
    one = store("abcde", at_once=2)
    one.lookup([*"abcde", *"abcde"], 0.0)
    assert [carry(one), carry(one), carry(one), carry(one)] == [["a", "b"], ["c", "d"], ["e"], []]


def test_above_the_watermark_lookups_are_refused_and_below_it_they_are_not() -> None:
    one = store(capacity=100)
    one.put_start([(f"full-{number}", 10) for number in range(9)], 0.0)
    one.lookup(["a", "a"], 0.0)
    assert (one.counts.promotions_rejected, one.promotions.in_flight) == (1, 0)
    one.put_revoke(["full-0"])
    one.lookup(["a"], 0.0)
    assert carry(one) == ["a"]


def test_what_no_longer_fits_when_its_node_fetches_it_stays_on_ssd_and_may_be_looked_up_again() -> None:
    one = store("abc", capacity=25)
    one.lookup([*"abc", *"abc"], 0.0)
    assert carry(one) == ["a", "b"]
    assert (one.counts.promotions_failed, one.promotions.in_flight) == (1, 0)
    one.remove("a")
    one.lookup(["c"], 0.0)
    assert carry(one) == ["c"]


def test_nothing_comes_into_a_segment_that_drains() -> None:
    one = store()
    one.lookup(["a", "a"], 0.0)
    one.segments["n0"].status = SegmentStatus.DRAINING
    assert one.take_promotions("c0") == []
    assert one.counts.promotions_failed == 1


def test_an_object_that_is_removed_on_its_way_gives_its_room_back() -> None:
    one = store()
    one.lookup([*"abab"], 0.0)
    one.take_promotions("c0")
    assert one.used_bytes == 20
    one.remove("a")
    assert one.used_bytes == 10
    assert one.end_promotions("c0", ["a", "b"], 1.0) == [False, True]
    assert (one.used_bytes, one.counts.promotions_cancelled) == (10, 1)


def test_an_engine_that_reads_what_waits_brings_it_at_once_and_what_is_carried_is_left_to_its_node() -> None:
    one = store()
    one.lookup(["a", "a"], 0.0)
    assert one.get(["a"], 0.0) == [ON_SSD]
    assert one.get(["a"], 0.0) == [IN_DRAM]
    assert one.take_promotions("c0") == []
    one.lookup(["b", "b"], 0.0)
    one.take_promotions("c0")
    assert one.get(["b", "b"], 0.0) == [ON_SSD, ON_SSD]
    assert one.end_promotions("c0", ["b"], 0.0) == [True]
    assert one.used_bytes == 20


def test_a_node_that_is_lost_takes_its_promotions_with_it_and_its_successor_has_none() -> None:
    one = store()
    one.lookup([*"abab"], 0.0)
    one.take_promotions("c0")
    one.mount(Segment("n0", "c1", 100, 1000), 1.0)
    assert one.promotions.in_flight == 0
    assert one.end_promotions("c0", ["a"], 1.0) == [False]
    assert one.end_promotions("c1", ["a"], 1.0) == [False]
    assert one.used_bytes == 0


def test_what_a_node_took_and_never_told_of_is_given_up_when_it_asks_again() -> None:
    one = store()
    one.lookup(["a", "a"], 0.0)
    one.take_promotions("c0")
    assert one.take_promotions("c0") == []
    assert (one.used_bytes, one.promotions.in_flight, one.counts.promotions_failed) == (0, 0, 1)
    assert one.end_promotions("c0", ["a"], 1.0) == [False]
    one.lookup(["a"], 1.0)
    assert carry(one) == ["a"]


def test_nobody_ends_the_promotions_of_another_node() -> None:
    one = store()
    one.mount(Segment("n1", "c1", 100, 1000), 0.0)
    one.lookup(["a", "a"], 0.0)
    one.take_promotions("c0")
    assert one.end_promotions("c1", ["a"], 0.0) == [False]
    assert one.end_promotions("c0", ["a"], 0.0) == [True]


def test_what_is_on_its_way_does_not_leave_a_full_ssd() -> None:
    one = Directory(lease_s=1.0, promotion=PromotionRules(on_hit=True, admission_threshold=1))
    one.mount(Segment("n0", "c0", 100, 20), 0.0)
    for key in "abc":
        one.put_start([(key, 10)], 0.0)
        one.put_end([key], 0.0)
        if key != "c":
            one.evict(0.0)
    one.lookup(["a"], 0.0)
    one.take_promotions("c0")
    one.evict(5.0)
    assert [one.peek(key) is not None for key in "abc"] == [True, False, True]
    assert one.end_promotions("c0", ["a"], 5.0) == [True]


def test_counts_are_never_too_low_and_are_halved_now_and_then() -> None:
    counts = LookupCounts()
    assert [counts.count("a") for _ in range(3)] == [1, 2, 3]
    for number in range(DECAY_AFTER - 3):
        counts.count(f"key-{number % 50}")
    assert counts.count("a") == 2
    for _ in range(300):
        most = counts.count("b")
    assert most == 255


def test_a_hundred_keys_do_not_meet_in_every_row() -> None:
    counts = LookupCounts()
    assert {counts.count(f"key-{number}") for number in range(100)} == {1}


def test_the_store_client_needs_no_more_than_msgspec_which_a_sidecar_has() -> None:
    program = (
        "import sys, msgspec; before = set(sys.modules);"
        "import mooncake_simulator.store.client; print(*set(sys.modules) - before)"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    roots = {name.partition(".")[0] for name in run.stdout.split()}
    assert roots - sys.stdlib_module_names == {"mooncake_simulator"}
