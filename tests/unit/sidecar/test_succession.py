"""Who takes over from an instance that left."""

from collections import Counter

from mooncake_sidecar.engine.succession import heir


def test_all_that_remain_choose_the_same_heir_and_heirs_share_the_work() -> None:
    live = [f"prefill-{n}" for n in range(4)]
    heirs = Counter(heir(f"gone-{n}", live) for n in range(400))
    assert set(heirs) == set(live)
    assert max(heirs.values()) < 200
    assert all(heir(f"gone-{n}", reversed(live)) == heir(f"gone-{n}", live) for n in range(50))


def test_where_nobody_remains_nobody_takes_over() -> None:
    assert heir("gone", []) is None
