"""What the admin API shows, as JSON-ready documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mooncake_core.ledger import InstanceLoad
from mooncake_core.percentiles import percentile
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.model import Placement
from mooncake_scheduler.gateway.breaker import BreakerState
from mooncake_scheduler.gateway.decisions import Decision
from mooncake_scheduler.gateway.roster import Member
from mooncake_scheduler.gateway.services import Services

_IDLE = InstanceLoad()


def instance_views(services: Services) -> list[dict[str, Any]]:
    """All instances, stores included, by id."""
    loads = services.ledger.loads(services.clock.now_s())
    members = services.roster.members
    views = {
        member.instance.id: _engine_view(services, member, loads.get(member.instance.id, _IDLE))
        for member in members.values()
    }
    views |= {store.id: _announced(store) | {"conditions": []} for store in services.roster.stores.values()}
    return [views[instance_id] for instance_id in sorted(views)]


def _engine_view(services: Services, member: Member, load: InstanceLoad) -> dict[str, Any]:
    report = services.roster.reports.get(member.instance.id)
    foreign = services.placer.worlds.reported.foreign.get(member.instance.id)
    conditions = []
    if member.tokenizer_mismatch:
        conditions.append({"type": "TokenizerMismatch", "message": member.tokenizer_mismatch})
    if member.breaker.state is not BreakerState.CLOSED:
        conditions.append({"type": "BreakerOpen", "message": f"{member.breaker.faults} faults in a row"})
    return _announced(member.instance) | {
        "state": member.state.value,
        "load": {
            "queued_s": load.queued_s,
            "queued": load.queued,
            "waiting": len(load.waiting),
            "batch": load.batch,
            "arriving": load.arriving,
            "kv_tokens": load.kv_tokens,
        },
        "foreign": None if foreign is None else foreign._asdict(),
        "report": None if report is None else msgspec.to_builtins(report),
        "requests": member.requests,
        "prompt_tokens": member.prompt_tokens,
        "cached_tokens": member.cached_tokens,
        "token_hit_rate": _share(member.cached_tokens, member.prompt_tokens),
        "breaker": member.breaker.state.value,
        "conditions": conditions,
    }


def _announced(instance: Instance) -> dict[str, Any]:
    """All fields, those at their defaults too."""
    return {name: getattr(instance, name) for name in Instance.__struct_fields__}


def stats_view(services: Services, degraded: Sequence[str]) -> dict[str, Any]:
    """Counters since the start, percentiles over the last requests, and the last minutes as sketches."""
    metrics, slo = services.metrics, services.config.slo
    refused: dict[str, int] = {}
    for (decided, reason), count in metrics.admissions.items():
        if decided == "refused":
            refused[reason] = refused.get(reason, 0) + count
    return {
        "cluster": services.config.cluster,
        "time_scale": services.config.time_scale,
        "index": services.residency.mode,
        "degraded": list(degraded),
        "admitted": metrics.admissions["admitted", ""],
        "refused": refused,
        "completed": metrics.outcomes["completed"],
        "failed": metrics.outcomes["failed"] + metrics.outcomes["broken"],
        "cancelled": metrics.outcomes["cancelled"],
        "goodput": metrics.goodput,
        "goodput_unjudged": metrics.unjudged,
        "wasted_prefills": metrics.wasted_prefills,
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "output_tokens": metrics.output_tokens,
        "token_hit_rate": _share(metrics.cached_tokens, metrics.prompt_tokens),
        "ttft": _percentiles(metrics.recent_ttft_s),
        "tbt": _percentiles(metrics.recent_tbt_s),
        "recent": metrics.recently(),
        "slo": slo.model_dump(),
        "instances": {
            member.instance.id: {
                "requests": member.requests,
                "token_hit_rate": _share(member.cached_tokens, member.prompt_tokens),
            }
            for member in services.roster.members.values()
        },
    }


def decision_view(
    decision: Decision, explain: Callable[[Decision], Placement | None] | None = None
) -> dict[str, Any]:
    """One decision; with `explain`, all candidates that were looked at."""
    placement = (explain(decision) if explain is not None else None) or decision.placement
    return {
        "request_id": decision.request_id,
        "at_s": decision.at_s,
        "tenant": decision.tenant,
        "path": decision.path,
        "ask": None if decision.ask is None else msgspec.structs.asdict(decision.ask),
        "placement": None if placement is None else _placement_view(placement),
        "attempts": decision.attempts,
        "moves": decision.moves,
        "refused": None if decision.refused is None else decision.refused.value,
        "outcome": decision.outcome,
        "index": decision.index,
        "cached_tokens": decision.cached_tokens,
        "output_tokens": decision.output_tokens,
        "held_s": decision.held_s,
        "prefill_s": decision.prefill_s,
        "ttft_s": decision.ttft_s,
        "tbt_s": decision.tbt_s,
        "decode_wait_s": decision.decode_wait_s,
        "transfer_s": decision.transfer_s,
        "streamed": decision.streamed,
        "prediction_error": _prediction_error(decision),
        "total_s": decision.total_s,
    }


def _prediction_error(decision: Decision) -> dict[str, float | None]:
    """Measured less predicted, in model seconds; None where one of them is not known."""
    placement = decision.placement
    if placement is None:
        return {"prefill_s": None, "ttft_s": None, "tbt_s": None}
    return {
        "prefill_s": _difference(decision.prefill_s, placement.prefill_s),
        "ttft_s": _difference(decision.ttft_s, placement.ttft_s + placement.wait_s),
        "tbt_s": _difference(decision.tbt_s, placement.tbt_s),
    }


def _difference(measured: float | None, predicted: float) -> float | None:
    return None if measured is None else measured - predicted


def _placement_view(placement: Placement) -> dict[str, Any]:
    return {
        "prefill": None if placement.prefill is None else placement.prefill.id,
        "decode": placement.decode.id,
        # Names are used again by later instances: only the revision says that old and new never met.
        "prefill_revision": None if placement.prefill is None else placement.prefill.revision,
        "decode_revision": placement.decode.revision,
        "prefix_tokens": placement.prefix_tokens,
        "fetch_tokens": placement.fetch_tokens,
        "queue_s": placement.queue_s,
        "transfer_s": placement.transfer_s,
        "prefill_s": placement.prefill_s,
        "wait_s": placement.wait_s,
        "ttft_s": placement.ttft_s,
        "tbt_s": placement.tbt_s,
        "considered": [msgspec.structs.asdict(each) for each in placement.considered],
        "considered_decode": [msgspec.structs.asdict(each) for each in placement.considered_decode],
    }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p90": None, "p99": None}
    return {f"p{p}": percentile(ordered, p / 100) for p in (50, 90, 99)}
