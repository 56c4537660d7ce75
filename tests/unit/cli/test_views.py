from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType

from mooncakectl.local.runtime import PodStatus
from mooncakectl.status.decision import decision_view
from mooncakectl.status.snapshot import Answers, Snapshot, snapshot_of
from mooncakectl.status.tables import snapshot_tables


def text_of(view: RenderableType) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(view)
        return console.export_text()


def instance(name: str, role: str, **fields: Any) -> dict[str, Any]:
    load = {"queued_s": 1.5, "batch": 3, "kv_tokens": 250_000}
    known = {"id": name, "role": role, "state": "ready", "load": load, "kv_capacity_tokens": 1_000_000}
    return known | {"requests": 10, "prompt_tokens": 1000, "cached_tokens": 250, "conditions": []} | fields


def stats(**fields: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "admitted": 10,
        "completed": 8,
        "failed": 1,
        "refused": {"ttft": 2},
        "prompt_tokens": 1000,
        "cached_tokens": 250,
        "ttft": {"p50": 1.0, "p90": 2.0},
        "tbt": {"p50": 0.05, "p90": 0.2},
        "slo": {"ttft_s": 30.0, "ttft_percentile": 90, "tbt_s": 0.1, "tbt_percentile": 90},
        "degraded": [],
    }
    return known | fields


def test_a_status_tells_load_latency_against_slo_and_refusals() -> None:
    listed = [
        instance("p-0", "prefill"),
        instance("d-0", "decode", state="draining", conditions=[{"type": "BreakerOpen"}]),
        {"id": "kv", "role": "store"},
    ]
    snapshot = snapshot_of(Answers([{"instances": listed}], [stats()]))
    text = text_of(snapshot_tables(snapshot))
    first, second = (next(line for line in text.splitlines() if name in line) for name in ("p-0", "d-0"))
    assert "1.50 s" in first
    assert "25.0 %" in first
    assert "draining" in second
    assert "BreakerOpen" in second
    assert "kv " not in text
    assert "P50 1.00 s  P90 2.00 s  SLO P90 30.00 s  met" in text
    assert "SLO P90 100.00 ms  missed" in text
    assert "10 admitted, 2 (ttft 2) refused; 8 completed, 1 failed" in text


def test_counters_of_several_schedulers_add_up_and_latencies_are_the_worst() -> None:
    documents = [{"instances": [instance("p-0", "prefill")]} for _ in range(2)]
    other = stats(refused={"tbt": 1, "ttft": 1}, cached_tokens=750, ttft={"p50": 3.0, "p90": None})
    snapshot = snapshot_of(Answers(documents, [stats(), other]))
    assert snapshot.admitted == 20
    assert dict(snapshot.refused) == {"ttft": 3, "tbt": 1}
    assert snapshot.token_hit_rate == 0.5
    assert (snapshot.ttft.p50_s, snapshot.ttft.p90_s) == (3.0, 2.0)
    assert [row.requests for row in snapshot.instances] == [20]


def test_what_is_degraded_and_who_does_not_answer_is_shown() -> None:
    degraded = stats(degraded=["Redis is away"])
    snapshot = snapshot_of(Answers([{"instances": []}], [degraded], ["no answer from :1"]))
    text = text_of(snapshot_tables(snapshot))
    assert "Redis is away" in text
    assert "no answer from :1" in text


def test_an_older_scheduler_that_says_less_is_shown_all_the_same() -> None:
    text = text_of(snapshot_tables(snapshot_of(Answers([{"instances": [{"id": "p-0"}]}], [{}]))))
    assert "p-0" in text
    assert "0 admitted, 0 refused" in text


def test_pods_that_are_not_ready_say_why() -> None:
    pod = PodStatus("p-0", {}, False, 3, ())
    text = text_of(snapshot_tables(Snapshot(), [pod]))
    assert "p-0" in text
    assert "starting" in text
    assert "p-0" not in text_of(snapshot_tables(Snapshot(), [PodStatus("p-0", {}, True, 0, ())]))


DECISION: dict[str, Any] = {
    "request_id": "r-1",
    "path": "/v1/completions",
    "tenant": "default",
    "ask": {"prompt_tokens": 2048},
    "placement": {
        "prefill": "p-1",
        "decode": "d-0",
        "prefix_tokens": 1024,
        "fetch_tokens": 512,
        "prefill_s": 0.25,
        "ttft_s": 1.25,
        "tbt_s": 0.03,
        "considered": [
            {"instance": "p-0", "prefix_tokens": 0, "queue_s": 2.0, "ttft_s": 2.5},
            {"instance": "p-1", "prefix_tokens": 1024, "queue_s": 0.5, "ttft_s": 1.25},
        ],
        "considered_decode": [{"instance": "d-0", "batch": 4, "kv_tokens": 9000, "tbt_s": 0.03}],
    },
    "attempts": 2,
    "refused": None,
    "outcome": "completed",
    "cached_tokens": 1024,
    "prefill_s": 0.3,
    "ttft_s": 1.5,
    "tbt_s": 0.04,
}


def test_an_explanation_marks_the_chosen_and_compares_predicted_with_measured() -> None:
    text = text_of(decision_view(DECISION))
    assert "→ p-1" in text
    assert "→ d-0" in text
    assert "  p-0" in text
    assert "1,024 of them expected from the cache (512 fetched from the store), 1,024 found there" in text
    assert "completed after 2 attempts" in text
    ttft = next(line for line in text.splitlines() if line.startswith("TTFT"))
    assert ttft.split() == ["TTFT", "1.250", "s", "1.500", "s", "+250.0", "ms", "(+20%)"]


def test_an_explanation_shows_a_prediction_that_was_too_high_and_leaves_out_what_was_not_measured() -> None:
    lines = text_of(decision_view(DECISION | {"prefill_s": 0.2, "tbt_s": None})).splitlines()
    compared = lines[lines.index("predicted against measured, in model seconds") :]
    prefill, tbt = (next(line for line in compared if line.startswith(name)) for name in ("prefill", "TBT"))
    assert prefill.split()[-3:] == ["−50.0", "ms", "(−20%)"]
    assert tbt.split() == ["TBT", "30.0", "ms", "–", "–"]


def test_a_refusal_is_explained_without_a_placement() -> None:
    refusal = DECISION | {"placement": None, "refused": "tenant_quota", "outcome": "refused"}
    text = text_of(decision_view(refusal))
    assert "refused: tenant_quota" in text
    assert "PREDICTED" not in text
