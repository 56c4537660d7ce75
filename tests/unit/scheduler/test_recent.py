"""What was measured lately, by windows of wall time."""

import pytest

from mooncake_core.sketch import Sketch
from mooncake_scheduler.recent import Recent


def test_a_window_holds_what_was_measured_in_it_and_nothing_older():
    recent = Recent()
    recent.observe(1000, 1.0, 2.0)
    recent.observe(1100, 3.0, 2.0)
    long, short = recent.window(1100, 300), recent.window(1100, 60)
    assert (long["count"], long["judged"], long["kept"]) == (2, 2, 1)
    assert (short["count"], short["judged"], short["kept"]) == (1, 1, 0)
    assert Sketch.from_wire(short["sketch"]).percentile(1.0) == pytest.approx(3.0, rel=0.02)


def test_without_traffic_the_windows_run_empty():
    recent = Recent()
    recent.observe(1000, 1.0, 2.0)
    assert recent.window(1400, 300) == {"count": 0, "judged": 0, "kept": 0, "sketch": {}}


def test_values_without_a_target_are_shown_and_not_judged():
    recent = Recent()
    recent.observe(1000, 1.0, None)
    assert recent.window(1000, 60)["count"] == 1
    assert recent.window(1000, 60)["judged"] == 0


def test_slots_of_long_ago_are_forgotten():
    recent = Recent()
    for at_s in range(0, 100_000, 10):
        recent.observe(at_s, 1.0, None)
    assert recent.window(99_990, 300)["count"] == 30
    assert recent.window(99_990, 1e9)["count"] == 30
