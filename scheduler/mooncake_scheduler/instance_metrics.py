"""Metrics read off at the moment they are asked for: instances, load, index."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from mooncake_core.ledger import InstanceLoad
from mooncake_scheduler.gateway.breaker import BreakerState
from mooncake_scheduler.gateway.services import Services
from mooncake_scheduler.metrics import gauge

MOST_INSTANCES = 256
"""Instances that get their own label; a larger cluster is watched by its sums."""
_IDLE = InstanceLoad()


def instance_families(
    services: Services, *, degraded: bool, index_bytes_in_redis: int | None = None
) -> Iterable[Metric]:
    """Gauges of the instances and of what this scheduler stands on."""
    loads = services.ledger.loads(services.clock.now_s())
    costs = services.placer.conductor.costs
    members = list(services.roster.members.values())
    listed = sorted(members, key=lambda member: member.instance.id)[:MOST_INSTANCES]

    inflight: dict[str, float] = {"prefill": 0, "decode": 0}
    for load in loads.values():
        inflight["prefill"] += load.queued
        inflight["decode"] += load.batch
    yield gauge(
        "mooncake_inflight", "Requests in the ledger, of all schedulers.", ["role"],
        (([role], count) for role, count in inflight.items()),
    )  # fmt: skip
    states: dict[tuple[str, str], int] = {}
    for member in members:
        key = (member.instance.role.value, member.state.value)
        states[key] = states.get(key, 0) + 1
    yield gauge("mooncake_instances", "Engine instances.", ["role", "state"], states.items())
    for name, text, values in (
        ("mooncake_instance_queued_seconds", "Prefill promised, model seconds.",
         [loads.get(m.instance.id, _IDLE).queued_s for m in listed]),
        ("mooncake_instance_batch", "Requests decoding.",
         [loads.get(m.instance.id, _IDLE).batch for m in listed]),
        ("mooncake_instance_kv_tokens", "KV tokens promised.",
         [loads.get(m.instance.id, _IDLE).kv_tokens for m in listed]),
        ("mooncake_instance_ttft_margin", "Times the predicted TTFT that admission reckons with.",
         [costs.of(m.instance).ttft_margin for m in listed]),
        ("mooncake_instance_breaker_open", "1 while faults keep requests away.",
         [float(m.breaker.state is not BreakerState.CLOSED) for m in listed]),
        ("mooncake_tokenizer_mismatch", "1 where the engine tokenises otherwise than the gateway.",
         [float(bool(m.tokenizer_mismatch)) for m in listed]),
    ):  # fmt: skip
        yield gauge(
            name, text, ["instance"], (([m.instance.id], v) for m, v in zip(listed, values, strict=True))
        )
    holding = services.holding
    yield gauge(
        "mooncake_decode_wait_requests", "Prefilled requests that wait for a place to decode.", [],
        [([], float(len(holding)))],
    )  # fmt: skip
    yield gauge(
        "mooncake_decode_wait_tokens", "Prompt tokens staged for them.", [], [([], float(holding.kv_tokens))]
    )
    yield gauge(
        "mooncake_index_local", "1 while the index is this scheduler's own although one is shared.", [],
        [([], float(services.shared_index is not None and services.residency.mode == "local"))],
    )  # fmt: skip
    index_bytes = [(["own"], float(services.residency.local_index.bytes))]
    if index_bytes_in_redis is not None:
        index_bytes.append((["redis"], float(index_bytes_in_redis)))
    yield gauge(
        "mooncake_index_bytes", "Memory of the prefix index: this scheduler's own, the shared one in Redis.",
        ["where"], index_bytes,
    )  # fmt: skip
    yield gauge("mooncake_degraded", "1 while something shared is away.", [], [([], float(degraded))])
    for name, text, value in services.counts():
        yield CounterMetricFamily(name, text, value=value)
