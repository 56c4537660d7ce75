"""How many instances a trace needs at least, before anything is simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Final

from mooncake_scheduler.conductor.cost import CostModel
from mooncake_simulator.cluster.cluster import ClusterSpec
from mooncake_simulator.workloads import BLOCK_TOKENS, Request
from mooncakectl.plan.search import Size
from mooncakectl.plan.slo import Objectives

_OF: Final = {"ttft": "to the first token", "tbt": "from token to token"}


def least_size(
    spec: ClusterSpec,
    trace: Sequence[Request],
    objectives: Objectives,
    speed: float,
    jitter_ms: float = 0.0,
) -> Size:
    """A size below which the SLO cannot be kept, whatever is placed where.

    Prefill: those requests that must come in time, the cheapest ones, have to be computed between the first
    arrival and the last one's limit, with nothing computed twice. Decode: their tokens, at the largest batch
    whose steps stay inside the limit; not where requests may come to decode as late as they like.
    """
    first = CostModel.from_profile(spec.prefill_kinds[0])
    model = CostModel.from_profile(spec.decode_kinds[0])
    span_s = arrivals_s(trace, speed) + jitter_ms / 1e3 / speed
    prefill = decode = 1
    if objectives.ttft is not None:
        needed_s = _cheapest(_prefills_s(first, trace), objectives.ttft.share)
        prefill = ceil(needed_s / (span_s + objectives.ttft.target_s) - 1e-9)
    if (
        objectives.tbt is not None
        and objectives.ttft is not None
        and objectives.ttft.share >= objectives.tbt.share
        and objectives.tbt.target_s > model.t0_s
    ):
        largest = (objectives.tbt.target_s - model.t0_s) / model.t1_s_per_request
        token_s = model.t1_s_per_request + model.t0_s / max(largest, 1.0)
        steps = [float(max(0, request.output_length - 1)) for request in trace]
        # Who is first to come may be the last to end: its steps, as slow as they may be, come on top.
        late_s = objectives.ttft.target_s + max(steps) * max(objectives.tbt.target_s, token_s)
        decode = ceil(_cheapest(steps, objectives.tbt.share) * token_s / (span_s + late_s) - 1e-9)
    return Size(max(1, prefill), max(1, decode))


def beyond_any_size(spec: ClusterSpec, trace: Sequence[Request], objectives: Objectives) -> str:
    """Why no number of instances keeps the SLO, for people; empty where some number may.

    Too many requests miss a target by themselves: alone on an instance, with all cached of the prompt that
    any other has, or alone in a batch.
    """
    first = CostModel.from_profile(spec.prefill_kinds[0])
    model = CostModel.from_profile(spec.decode_kinds[0])
    times = Counter(block for request in trace for block in request.hash_ids)
    alone_s: dict[str, list[float]] = {"ttft": [], "tbt": []}
    for request in trace:
        own = (at for at, block in enumerate(request.hash_ids) if times[block] == 1)
        cached = min(next(own, len(request.hash_ids)) * BLOCK_TOKENS, request.input_length - 1)
        alone_s["ttft"].append(first.prefill_s(request.input_length, cached))
        steps = request.output_length > 1
        alone_s["tbt"].append(model.step_s(1, request.input_length + 1) if steps else 0.0)
    for name, objective in (("ttft", objectives.ttft), ("tbt", objectives.tbt)):
        if objective is None:
            continue
        late = sum(each > objective.target_s for each in alone_s[name])
        if len(trace) - late < (objective.share - 1e-9) * len(trace):
            return (
                f"spec.slo.{name}: no number of instances keeps it: {late} of {len(trace)} requests "
                f"need more than {objective.target_s:g} s {_OF[name]} even alone on one "
                f"({spec.profile.name}), up to {max(alone_s[name]):.3g} s: write a larger target or a "
                "smaller percentile, or take instances of more Pods (instance.size) or other hardware "
                "(--profile)"
            )
    return ""


def arrivals_s(trace: Sequence[Request], speed: float) -> float:
    """Seconds from the first arrival to the last; a trace need not be in their order."""
    times_ms = [request.timestamp_ms for request in trace]
    return (max(times_ms) - min(times_ms)) / 1e3 / speed


def _prefills_s(model: CostModel, trace: Sequence[Request]) -> list[float]:
    """Seconds of computing for each request, with an endless cache."""
    seen: set[int] = set()
    seconds = []
    for request in trace:
        held = next((at for at, block in enumerate(request.hash_ids) if block not in seen), None)
        cached = request.input_length if held is None else held * BLOCK_TOKENS
        seconds.append(model.occupied_s(request.input_length, min(cached, request.input_length - 1)))
        seen.update(request.hash_ids)
    return seconds


def _cheapest(amounts: Sequence[float], share: float) -> float:
    """The sum of the smallest ones that make up a share."""
    return sum(sorted(amounts)[: ceil(share * len(amounts) - 1e-9)])
