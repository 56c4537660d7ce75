from mooncake_core.index import Depth, SpeculativeOverlay

KEYS = list(range(1, 101))


def test_what_was_dispatched_is_believed_until_it_expires() -> None:
    overlay = SpeculativeOverlay()
    overlay.add("a", KEYS[:40], expires_at_s=12.0, now_s=10.0)
    assert overlay.merge(KEYS, {}, now_s=11.9) == {"a": Depth(40, 40, 40)}
    assert overlay.merge(KEYS[:7], {}, now_s=11.9) == {"a": Depth(7, 7, 7)}
    assert overlay.merge([500, *KEYS], {}, now_s=11.9) == {}
    assert overlay.merge([], {}, now_s=11.9) == {}
    assert overlay.merge(KEYS, {}, now_s=12.0) == {}
    assert len(overlay) == 0


def test_the_deeper_of_index_and_overlay_counts_for_each_tier() -> None:
    overlay = SpeculativeOverlay()
    overlay.add("a", KEYS[:40], expires_at_s=12.0, now_s=10.0)
    matched = {"a": Depth(10, 50, 60), "b": Depth(20, 20, 20)}
    assert overlay.merge(KEYS, matched, now_s=11.0) == {"a": Depth(40, 50, 60), "b": Depth(20, 20, 20)}
    assert overlay.merge(KEYS, {"a": Depth(45, 45, 45)}, now_s=11.0) == {"a": Depth(45, 45, 45)}
    assert matched == {"a": Depth(10, 50, 60), "b": Depth(20, 20, 20)}


def test_blocks_the_index_knows_need_not_be_entered_and_are_not_believed_without_it() -> None:
    overlay = SpeculativeOverlay()
    overlay.add("a", KEYS[:40], expires_at_s=12.0, now_s=10.0, from_block=30)
    assert len(overlay) == 10
    assert overlay.merge(KEYS, {"a": Depth(30, 30, 30)}, now_s=11.0) == {"a": Depth(40, 40, 40)}
    assert overlay.merge(KEYS, {"a": Depth(20, 20, 20)}, now_s=11.0) == {"a": Depth(20, 20, 20)}
    assert overlay.merge(KEYS, {}, now_s=11.0) == {}


def test_a_second_dispatch_prolongs_only_what_it_covers() -> None:
    overlay = SpeculativeOverlay()
    overlay.add("a", KEYS[:40], expires_at_s=12.0, now_s=10.0)
    overlay.add("a", KEYS[:15], expires_at_s=20.0, now_s=11.0)
    overlay.add("a", KEYS[:15], expires_at_s=13.0, now_s=11.0)
    assert overlay.merge(KEYS, {}, now_s=11.0)["a"].hbm == 40
    assert overlay.merge(KEYS, {}, now_s=15.0)["a"].hbm == 15
    assert overlay.merge(KEYS, {}, now_s=20.0) == {}


def test_a_cleared_instance_is_not_believed_and_the_others_are() -> None:
    overlay = SpeculativeOverlay()
    for name in ("a", "b"):
        overlay.add(name, KEYS[:40], expires_at_s=12.0, now_s=10.0)
    overlay.forget("a")
    assert overlay.merge(KEYS, {}, now_s=11.0) == {"b": Depth(40, 40, 40)}
    assert len(overlay) == 40


def test_it_stays_within_its_bound_and_drops_first_what_would_end_first() -> None:
    overlay = SpeculativeOverlay(max_blocks=100)
    for number in range(50):
        overlay.add(f"i{number}", KEYS[:10], expires_at_s=12.0 + number, now_s=10.0)
        assert len(overlay) <= 100
    assert set(overlay.merge(KEYS, {}, now_s=11.0)) == {f"i{number}" for number in range(40, 50)}
