"""What a report draws of a run: a few hundred numbers in place of thousands of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.cluster.outcome import Result
from mooncake_simulator.cluster.replicas import Replicas
from mooncake_simulator.cluster.series import Load

_QUANTILES = 200
_WINDOWS = 180


@dataclass(frozen=True, slots=True)
class Curves:
    """One run, seed 0 of its set-up."""

    ttft_s: list[float]
    """In rising order, as many as there are `completed` or evenly chosen among them."""
    tbt_s: list[float]
    ttft_error_s: list[float]
    """What was measured less what was foretold, in rising order."""
    tbt_error_s: list[float]
    answered: float
    """Share of the requests that got an answer: where the curve of the TTFT ends."""
    load: Load | None
    replicas: Replicas | None
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Where the prompts' KV came from; what was computed is the last."""
    refused_by_reason: dict[str, int] = field(default_factory=dict)
    promoted_blocks: dict[str, int] = field(default_factory=dict)
    """What became of blocks that were read ahead from SSD; empty where nothing was."""


def curves_of(spec: ClusterSpec, result: Result) -> Curves:
    """What is drawn of a run."""
    ttft_errors_s, tbt_errors_s = result.prediction_errors_s()
    ttfts_s = result.ttfts_s()
    return Curves(
        ttft_s=_thinned(ttfts_s),
        tbt_s=_thinned(result.tbts_s()),
        ttft_error_s=_thinned(ttft_errors_s),
        tbt_error_s=_thinned(tbt_errors_s),
        answered=len(ttfts_s) / max(1, result.requests),
        load=result.load and _coarser(result.load),
        replicas=result.replicas,
        prompt_tokens=_sources(spec, result),
        refused_by_reason=result.refused_by_reason,
        promoted_blocks=_promoted(result),
    )


def _thinned(ordered: Sequence[float]) -> list[float]:
    """Evenly chosen of the ranks, the first and the last among them."""
    if len(ordered) <= _QUANTILES:
        return list(ordered)
    last = len(ordered) - 1
    return [ordered[round(at * last / (_QUANTILES - 1))] for at in range(_QUANTILES)]


def _coarser(load: Load) -> Load:
    """Means over so many windows each that a plot can show them."""
    width = -(-max(len(load.prefill), 1) // _WINDOWS)
    return Load(
        load.window_s * width, *(_means(each, width) for each in (load.prefill, load.decode, load.kv))
    )


def _means(values: Sequence[float], width: int) -> list[float]:
    parts = [values[at : at + width] for at in range(0, len(values), width)]
    return [sum(part) / len(part) for part in parts]


def _sources(spec: ClusterSpec, result: Result) -> dict[str, int]:
    seen = [outcome for outcome in result.outcomes if outcome.prefill_s]
    cached, fetched = sum(o.cached_tokens for o in seen), sum(o.fetched_tokens for o in seen)
    found = {"own cache": cached - fetched}
    if result.tiers is not None:
        found |= {"store, DRAM": fetched - result.tiers.ssd_tokens, "store, SSD": result.tiers.ssd_tokens}
    elif spec.fetch != "none":
        found["store" if spec.fetch == "store" else "other instances"] = fetched
    return found | {"computed": sum(o.prompt_tokens for o in seen) - cached}


def _promoted(result: Result) -> dict[str, int]:
    tiers = result.tiers
    if tiers is None:
        return {}
    blocks = {"in time": tiers.in_time_blocks, "late": tiers.late_blocks, "wasted": tiers.wasted_blocks}
    return blocks if any(blocks.values()) else {}
