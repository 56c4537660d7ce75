"""SLOMet, the columns TTFT and TBT, CapacityReady: what they say, and how seldom they say something new."""

import pytest

from mooncake_core.api.slo import SloSpec, SloTarget
from mooncake_core.sketch import Sketch
from mooncake_operator.control.stores import level_of
from mooncake_operator.planning import reasons
from mooncake_operator.planning.capacity import StoreLevel, binary, capacity_verdict, level_fields
from mooncake_operator.planning.latencies import Latencies, duration
from mooncake_operator.planning.measuring import Measurement, settled_measurement
from mooncake_operator.planning.verdicts import Verdict

SLO = SloSpec(ttft=SloTarget(target="2s"), tbt=SloTarget(target="100ms"))


def window(values, target_s):
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    kept = sum(value <= target_s for value in values)
    return {"count": len(values), "judged": len(values), "kept": kept, "sketch": sketch.to_wire()}


def stats(long_ttft=(), short_ttft=None, tbt=None):
    """One scheduler's answer."""
    short_ttft = long_ttft if short_ttft is None else short_ttft
    tbt = [0.05] * len(long_ttft) if tbt is None else tbt
    return {
        "recent": {
            "300": {"ttft": window(long_ttft, 2), "tbt": window(tbt, 0.1)},
            "60": {"ttft": window(short_ttft, 2), "tbt": window(tbt, 0.1)},
        }
    }


def verdict(*documents, before=None, slo=SLO):
    return Latencies(documents).verdict(slo, before)


def test_schedulers_weigh_as_much_as_they_serve():
    busy, idle = stats([1.0] * 95), stats([9.0] * 5)
    both = Latencies([busy, idle])
    assert both.verdict(SLO, None).holds is True
    assert both.shown(SLO) == {"ttft": "990ms", "tbt": "50ms"}, "to one per cent"
    assert "95 % of requests keep TTFT 2s (wanted: 90 %)" in both.verdict(SLO, None).message


def test_a_missed_target_is_named_with_the_share_that_kept_it():
    found = verdict(stats([1.0] * 80 + [9.0] * 20))
    assert (found.holds, found.reason) == (False, reasons.SLO_MISSED)
    assert "80 % of requests keep TTFT 2s (wanted: 90 %)" in found.message
    assert "100 % of requests keep TBT 100ms" in found.message


def test_targets_that_are_multiples_are_judged_request_by_request():
    slo = SloSpec(ttft=SloTarget(multiplier="10"))
    found = verdict(stats([1.0] * 50), slo=slo)
    assert (found.holds, "TTFT 10 times that of an idle request" in found.message) == (True, True)


def test_without_traffic_or_with_too_little_nothing_is_claimed():
    assert verdict(stats()).reason == reasons.NO_TRAFFIC
    assert verdict(stats([1.0] * 19)).reason == reasons.TOO_FEW_REQUESTS
    assert verdict(stats([1.0] * 19), before="True").holds is True, "what is known does not come and go"
    assert verdict(stats([1.0] * 9), before="True").holds is None
    assert Latencies([stats()]).shown(SLO) == {"ttft": None, "tbt": None}


@pytest.mark.parametrize("answers", [[], [{}], [{"recent": {}}], [{"recent": {"300": 1, "60": 2}}]])
def test_schedulers_that_tell_nothing_of_the_kind_make_it_unknown(answers):
    assert verdict(*answers).reason == reasons.STATISTICS_UNKNOWN


def test_a_scheduler_of_another_version_does_not_spoil_the_others():
    assert verdict({"recent": None}, stats([1.0] * 50)).holds is True


def test_without_an_slo_there_is_no_condition_and_the_columns_show_the_p90():
    found = Latencies([stats([float(n) for n in range(1, 101)])])
    assert found.verdict(SloSpec(), None) is None
    assert found.shown(SloSpec())["ttft"] in ("89s", "90s", "91s")


BAD, GOOD = [9.0] * 50, [1.0] * 50


@pytest.mark.parametrize(
    ("long", "short", "before", "holds"),
    [
        (BAD, GOOD, "True", True),  # over already: not held against it
        (BAD, BAD, "True", False),
        (GOOD, BAD, "False", False),  # not good again yet
        (GOOD, GOOD, "False", True),
        (BAD, GOOD, "False", False),
        (GOOD, BAD, "True", True),
        (BAD, GOOD, None, False),
        (GOOD, BAD, "Unknown", True),
    ],
)
def test_it_turns_only_when_both_windows_say_so(long, short, before, holds):
    assert verdict(stats(long, short), before=before).holds is holds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12s"), (1.234, "1.2s"), (0.9999, "1s"), (0.085, "85ms"), (0.00041, "0.41ms"), (123.4, "120s")],
)
def test_durations_have_two_digits(seconds, text):
    assert duration(seconds) == text


def settle(status, fields, verdict=None, *, now_s=1000.0, every_s=60.0, same=lambda f: f):
    measurement = Measurement(fields, verdict)
    return settled_measurement(
        status, "SLOMet", ("ttft",), lambda before: measurement, now_s=now_s, every_s=every_s, same=same
    )


MET = Verdict("SLOMet", True, "TargetsKept", "all of them")
MOST = Verdict("SLOMet", True, "TargetsKept", "most of them")
MISSED = Verdict("SLOMet", False, "TargetsMissed", "half of them")


def written(fields, verdict):
    """The status after a write."""
    condition = {"type": "SLOMet", "status": "True", "reason": verdict.reason, "message": verdict.message}
    return {**fields, "conditions": [condition]}


def test_a_measurement_stands_for_a_while_and_is_then_replaced_by_what_differs():
    fields, verdict = settle({}, {"ttft": "1s"}, MET)
    assert fields == {"ttft": "1s", "measuredTime": "1970-01-01T00:16:40Z"}
    status = written(fields, verdict)
    assert settle(status, {"ttft": "3s"}, MOST, now_s=1059) == (fields, MET)
    later, verdict = settle(status, {"ttft": "3s"}, MOST, now_s=1061)
    assert (later["ttft"], verdict) == ("3s", MOST)


def test_a_condition_that_turns_is_not_held_back():
    status = written(settle({}, {"ttft": "1s"}, MET)[0], MET)
    later, verdict = settle(status, {"ttft": "3s"}, MISSED, now_s=1001)
    assert (later["ttft"], verdict) == ("3s", MISSED)


def test_what_has_not_changed_is_never_written_again():
    status = written(settle({}, {"ttft": "1s"}, MET)[0], MET)
    fields, verdict = settle(status, {"ttft": "1s"}, MET, now_s=1e6)
    assert ({**status, **fields}, verdict) == (status, MET)


def test_without_a_new_measurement_the_last_one_stands():
    status = written(settle({}, {"ttft": "1s"}, MET)[0], MET)
    fields, verdict = settled_measurement(status, "SLOMet", ("ttft",), None, now_s=1e6, every_s=60)
    assert ({**status, **fields}, verdict) == (status, MET)


def test_what_is_no_longer_measured_is_no_longer_shown():
    status = written(settle({}, {"ttft": "1s"}, MET)[0], MET)
    fields, _ = settle(status, {"ttft": None}, MET, now_s=2000)
    assert "ttft" not in fields


def test_a_clock_that_went_back_does_not_freeze_a_measurement():
    status = written(settle({}, {"ttft": "1s"}, MET, now_s=5000)[0], MET)
    assert settle(status, {"ttft": "3s"}, MISSED, now_s=1000)[0]["ttft"] == "3s"


STORE = {"replicas": 2, "segmentSize": "4Ti"}


@pytest.mark.parametrize(
    ("capacity_bytes", "holds", "reason"),
    [(8 << 40, True, reasons.SEGMENTS_MOUNTED), (4 << 40, False, reasons.SEGMENTS_MISSING)],
)
def test_a_store_has_its_capacity_when_all_segments_are_mounted(capacity_bytes, holds, reason):
    found = capacity_verdict(STORE, StoreLevel(capacity_bytes, 1 << 40))
    assert (found.holds, found.reason) == (holds, reason)
    assert f"{binary(capacity_bytes)} of 8Ti (2 × 4Ti) are mounted" in found.message


def test_a_master_that_does_not_answer_leaves_the_capacity_unknown():
    found = capacity_verdict(STORE, None)
    assert (found.holds, found.reason) == (None, reasons.MASTER_UNREACHABLE)
    assert level_fields(None) == {}


def test_a_level_is_shown_for_people_and_programs():
    fields = level_fields(StoreLevel(8 << 40, 2 << 40))
    assert fields == {
        "capacityBytes": 8 << 40,
        "allocatedBytes": 2 << 40,
        "capacity": "8Ti",
        "used": "25%",
    }
    assert level_fields(StoreLevel(0, 0))["used"] == "0%"


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("# HELP x\nmaster_total_capacity_bytes 1.34e+08\nmaster_allocated_bytes 5\n", (134_000_000, 5)),
        ("master_total_capacity_bytes 10\n", (10, 0)),
        ("master_allocated_bytes 5\n", None),
        ("master_total_capacity_bytes NaN\n", None),
        ("<html>", None),
    ],
)
def test_a_masters_metrics_are_read(text, level):
    assert level_of(text) == (None if level is None else StoreLevel(*level))
