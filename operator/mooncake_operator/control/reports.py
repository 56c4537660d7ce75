"""Statuses and conditions of a cluster and its pools, from what a plan found and what runs says of itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_core.api.cluster import MooncakeClusterSpec
from mooncake_core.api.status import MAX_POOLS_LISTED
from mooncake_core.registry import Role
from mooncake_operator.control.asking import Answers
from mooncake_operator.control.picture import Picture
from mooncake_operator.control.status import UNDER_WAY, condition
from mooncake_operator.kube.resources import CLUSTER, KV_CACHE_POOL, Object, name_of, uid_of
from mooncake_operator.planning import reasons, troubles
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.capacity import capacity_verdict, level_fields
from mooncake_operator.planning.latencies import Latencies
from mooncake_operator.planning.measuring import Measurement, settled_measurement
from mooncake_operator.planning.observed import ObservedPod
from mooncake_operator.planning.plan import Plan, PoolOutcome
from mooncake_operator.planning.refusals import refusal
from mooncake_operator.planning.statuses import pool_status
from mooncake_operator.planning.verdicts import Verdict, pool_verdicts, ratio_verdict

Refusals = Mapping[str, Sequence[Finding]]
_LATENCIES = ("ttft", "tbt")
_LEVEL = ("capacityBytes", "allocatedBytes", "capacity", "used")
_COLUMNS = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(frozen=True, slots=True)
class Context:
    """What all reports of one pass are made from."""

    picture: Picture
    """What was planned on."""
    plan: Plan
    """What came of it."""
    refusals: Refusals
    """By pool in planning, why Pods could not be made."""
    answers: Answers
    measure_s: float
    """How long a measurement stands in a status at least."""

    def measured(
        self,
        live: Object,
        condition_type: str,
        names: tuple[str, ...],
        measure: Callable[[str | None], Measurement],
        same: Callable[[Mapping[str, Any]], Any] = lambda fields: fields,
    ) -> tuple[Object, list[Object]]:
        """Fields that were measured and the condition that rests on them, old or new."""
        status = live.get("status") or {}
        is_news = status.get("observedGeneration") != live["metadata"].get("generation")
        fields, verdict = settled_measurement(
            status,
            condition_type,
            names,
            measure if self.answers.measured else None,
            now_s=self.picture.observed.now_s,
            every_s=0 if is_news else self.measure_s,
            same=same,
        )
        return fields, [] if verdict is None else [_condition(verdict)]


def pool_report(context: Context, pool: Object) -> tuple[Object, list[Object]]:
    """Status and conditions of one live pool object, a store's masters and level included."""
    picture, plan, refusals = context.picture, context.plan, context.refusals
    status: Object = {}
    conditions: list[Object] = []
    records: list[Any] = []
    for outcome in _outcomes(picture, plan, pool):
        made = pool_status(outcome, picture.observed)
        verdicts = pool_verdicts(
            picture.desired, outcome, picture.observed, refusals.get(outcome.pool.name, ())
        )
        records += made["recreations"]
        if outcome.pool.name == name_of(pool):
            status |= made
            conditions += map(_condition, verdicts)
        else:
            available = verdicts[0]
            conditions.append(condition("MasterReady", available.holds, available.reason, available.message))
    if pool["kind"] == KV_CACHE_POOL.kind:
        level = context.answers.store
        measurement = Measurement(level_fields(level), capacity_verdict(pool["spec"], level))
        fields, capacity = context.measured(
            pool, "CapacityReady", _LEVEL, lambda before: measurement, lambda f: f.get("used")
        )
        status, conditions = status | fields, conditions + capacity
    return {**status, "recreations": records}, conditions


def cluster_report(
    context: Context,
    cluster: Object,
    spec: MooncakeClusterSpec | None,
    *,
    findings: Sequence[Finding],
    scheduler: Object | None,
    scheduler_pods: Sequence[ObservedPod],
) -> tuple[Object, list[Object]]:
    """Status and conditions of the cluster.

    Args:
        context: of this pass.
        cluster: the live object.
        spec: what was planned for; None = the cluster's spec could not be.
        findings: what keeps its objects from being as they should.
        scheduler: the live Deployment.
        scheduler_pods: its Pods.
    """
    picture, plan, refusals = context.picture, context.plan, context.refusals
    name, namespace = name_of(cluster), cluster["metadata"]["namespace"]
    endpoint = f"http://{name}-scheduler.{namespace}.svc" if scheduler else None
    serving = scheduler_ready(scheduler, scheduler_pods, context.answers.unreachable)
    if spec is None:
        # What runs goes on, and so does what is known of it.
        return {**kept_status(cluster), "endpoint": endpoint}, [_ready(findings, serving, []), serving]
    status: Object = {"endpoint": endpoint}
    outcomes = list(plan.outcomes.values())
    verdicts = [
        (o, pool_verdicts(picture.desired, o, picture.observed, refusals.get(o.pool.name, ()))[0])
        for o in outcomes
        if o.pool.deleted_s is None
    ]
    own = _outcomes(picture, plan, cluster)
    status |= _columns(outcomes)
    status["pools"] = _summaries(picture, outcomes)
    status["recreations"] = [
        record for o in own for record in pool_status(o, picture.observed)["recreations"]
    ]
    if serving["status"] == "True" and (held_up := scheduler_held_up(scheduler, scheduler_pods)) is not None:
        findings = [*findings, held_up]
    own_pools = {outcome.pool.name for outcome in own}
    conditions = [_ready(findings, serving, verdicts, own_pools, context.answers.degraded), serving]
    latencies = Latencies(context.answers.statistics)
    fields, slo = context.measured(
        cluster,
        "SLOMet",
        _LATENCIES,
        lambda before: Measurement(latencies.shown(spec.slo), latencies.verdict(spec.slo, before)),
    )
    status, conditions = status | fields, conditions + slo
    if (ratio := ratio_verdict(picture.desired, outcomes)) is not None:
        conditions.append(_condition(ratio))
    return status, conditions


def _outcomes(picture: Picture, plan: Plan, owner: Object) -> list[PoolOutcome]:
    return [o for name, o in plan.outcomes.items() if uid_of(picture.owners[name]) == uid_of(owner)]


def _condition(verdict: Verdict) -> Object:
    return condition(verdict.type, verdict.holds, verdict.reason, verdict.message)


def kept_status(live: Object) -> Object:
    """The fields that a status has, for a pass that has nothing to say of them."""
    kept: Object = {
        name: value
        for name, value in (live.get("status") or {}).items()
        if name not in ("conditions", "observedGeneration")
    }
    return kept


def _ready(
    findings: Sequence[Finding],
    serving: Object,
    pools: Sequence[tuple[PoolOutcome, Verdict]],
    own: Collection[str] = (),
    degraded: Sequence[str] = (),
) -> Object:
    """`Ready`; `own` are the pools in planning that are the cluster's itself."""
    if findings:
        return condition("Ready", False, findings[0].reason, "; ".join(f.message for f in findings))
    broken = [(outcome.pool, available) for outcome, available in pools if not available.holds]
    if serving["status"] != "True":
        # Schedulers wait for the cluster's Redis, for which no object of its own speaks.
        waiting = serving["reason"] == reasons.SCHEDULER_UNAVAILABLE
        broken = [(p, v) for p, v in broken if waiting and p.name in own and v.reason not in UNDER_WAY]
        if not broken:
            return condition("Ready", False, serving["reason"], serving["message"])
    if broken:
        pool, available = broken[0]
        return condition("Ready", False, available.reason, f"pool {pool.name}: {available.message}")
    if not any(outcome.pool.gated for outcome, _ in pools):
        return condition("Ready", False, reasons.NO_POOLS, "no prefill or decode pool; write prefillPools")
    if degraded:
        message = (
            f"requests are served, but {'; '.join(degraded)}; see whether the Redis of spec.scheduler.redis"
            " runs and can be reached from the schedulers"
        )
        return condition("Ready", False, reasons.SHARED_STATE_AWAY, message)
    return condition("Ready", True, reasons.POOLS_AVAILABLE)


def scheduler_ready(scheduler: Object | None, pods: Sequence[ObservedPod], unreachable: str) -> Object:
    """`SchedulerReady`, from the Deployment, its Pods, and why none of them answers if none does."""
    if scheduler is None:
        return condition("SchedulerReady", False, reasons.SCHEDULER_ABSENT, "there is no scheduler yet")
    status, wanted = scheduler.get("status") or {}, scheduler["spec"].get("replicas", 1)
    available, updated = status.get("availableReplicas", 0), status.get("updatedReplicas", 0)
    message = f"{available} of {wanted} schedulers are available"
    if status.get("observedGeneration") == scheduler["metadata"].get("generation") and updated < wanted:
        message += f", {updated} have the newest configuration"
    if available and not unreachable:
        return condition("SchedulerReady", True, reasons.SCHEDULER_AVAILABLE, message)
    if available:
        message += (
            f", but none answers the operator on its admin port ({unreachable}): new instances cannot be"
            " used; does a NetworkPolicy keep the operator out?"
        )
        return condition("SchedulerReady", False, reasons.SCHEDULER_UNREACHABLE, message)
    if (trouble := _scheduler_trouble(status, pods)) is not None:
        return condition("SchedulerReady", False, trouble.reason, f"{message}; {trouble.message}")
    return condition("SchedulerReady", False, reasons.SCHEDULER_UNAVAILABLE, message)


def scheduler_held_up(scheduler: Object | None, pods: Sequence[ObservedPod]) -> Finding | None:
    """Why a rollout of the schedulers gets no further, though the old ones serve; None = nothing is wrong."""
    if scheduler is None:
        return None
    status, wanted = scheduler.get("status") or {}, scheduler["spec"].get("replicas", 1)
    updated = status.get("updatedReplicas", 0)
    is_over = updated >= wanted and status.get("replicas", 0) <= updated
    if is_over or status.get("observedGeneration") != scheduler["metadata"].get("generation"):
        return None
    trouble = _scheduler_trouble(status, pods)
    if trouble is None:
        return None
    message = f"Deployment {name_of(scheduler)}: the newest configuration is not in use; {trouble.message}"
    return Finding(trouble.reason, message)


def _scheduler_trouble(status: Object, pods: Sequence[ObservedPod]) -> Finding | None:
    return _failure(status) or troubles.scheduling(pods) or troubles.starting(pods)


def _failure(status: Object) -> Finding | None:
    """Why Pods could not be made, which a Deployment knows better than its numbers."""
    failed: Object = next((c for c in status.get("conditions") or () if c["type"] == "ReplicaFailure"), {})
    return refusal(403, failed["message"]) if failed.get("message") else None


def _columns(outcomes: Iterable[PoolOutcome]) -> Object:
    shown: dict[str, list[int]] = {}
    for outcome in outcomes:
        pool = outcome.pool
        column = _COLUMNS.get(pool.role) or ("kv" if pool.join_interval_s else None)
        if column is None or pool.deleted_s is not None:
            continue
        counts = shown.setdefault(column, [0, 0])
        counts[0] += sum(i.routable for i in outcome.instances)
        counts[1] += pool.replicas
    return {column: f"{routable}/{wanted}" for column, (routable, wanted) in shown.items()}


def _summaries(picture: Picture, outcomes: Iterable[PoolOutcome]) -> list[Object]:
    found = []
    for outcome in outcomes:
        owner = picture.owners[outcome.pool.name]
        if owner["kind"] != CLUSTER.kind and name_of(owner) == outcome.pool.name:
            routable = sum(i.routable for i in outcome.instances)
            summary = {"replicas": outcome.pool.replicas, "routableReplicas": routable}
            found.append({"kind": owner["kind"], "name": name_of(owner), **summary})
    return sorted(found, key=lambda item: (str(item["kind"]), str(item["name"])))[:MAX_POOLS_LISTED]
