"""Conditions and their times."""

from __future__ import annotations

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from mooncake_operator.control.status import condition, settled

T1, T2 = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
BOOLS = st.sampled_from([True, False, None])


@given(BOOLS, BOOLS, st.sampled_from(["A", "B"]), st.text())
def test_the_time_of_a_condition_changes_with_its_status_and_with_nothing_else(
    before: bool | None, after: bool | None, reason: str, message: str
) -> None:
    old = settled([condition("Ready", before, "A")], [], generation=1, now=T1)
    (new,) = settled([condition("Ready", after, reason, message)], old, generation=2, now=T2)
    assert (new["lastTransitionTime"] == old[0]["lastTransitionTime"]) == (before == after)
    assert new["observedGeneration"] == 2


def test_the_order_of_conditions_does_not_depend_on_who_found_them() -> None:
    kinds = [condition(kind, True, "A") for kind in ("Ready", "Degraded", "Available")]
    one, other = (settled(order, [], generation=1, now=T1) for order in (kinds, kinds[::-1]))
    assert one == other


def test_a_message_without_end_is_cut() -> None:
    assert len(condition("Ready", False, "A", "x" * 100_000)["message"]) <= 4096
