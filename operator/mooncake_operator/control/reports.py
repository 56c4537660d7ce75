"""Statuses and conditions of a cluster and its pools, from what a plan found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mooncake_core.registry import Role
from mooncake_operator.control.picture import Picture
from mooncake_operator.control.status import condition
from mooncake_operator.kube.resources import CLUSTER, Object, name_of, uid_of
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.plan import Plan, PoolOutcome
from mooncake_operator.planning.statuses import pool_status
from mooncake_operator.planning.verdicts import Verdict, pool_verdicts, ratio_verdict

Refusals = Mapping[str, Sequence[Finding]]
_COLUMNS = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


def pool_report(
    picture: Picture, plan: Plan, pool: Object, refusals: Refusals
) -> tuple[Object, list[Object]]:
    """Status and conditions of one pool object, a store's masters included.

    Args:
        picture: what was planned on.
        plan: what came of it.
        pool: the live object.
        refusals: by pool in planning, why Pods could not be made.
    """
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
    return {**status, "recreations": records}, conditions


def cluster_report(
    picture: Picture,
    plan: Plan | None,
    cluster: Object,
    *,
    findings: Sequence[Finding],
    scheduler: Object | None,
    refusals: Refusals,
) -> tuple[Object, list[Object]]:
    """Status and conditions of the cluster.

    Args:
        picture: what was planned on.
        plan: what came of it; None = the cluster's spec could not be planned for.
        cluster: the live object.
        findings: what keeps its objects from being as they should.
        scheduler: the live Deployment.
        refusals: as `pool_report`.
    """
    name, namespace = name_of(cluster), cluster["metadata"]["namespace"]
    status: Object = {"endpoint": f"http://{name}-scheduler.{namespace}.svc" if scheduler else None}
    serving = _scheduler_ready(scheduler)
    if plan is None:
        return status, [_ready(findings, serving, []), serving]
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
    conditions = [_ready(findings, serving, verdicts), serving]
    if (ratio := ratio_verdict(picture.desired, outcomes)) is not None:
        conditions.append(_condition(ratio))
    return status, conditions


def _outcomes(picture: Picture, plan: Plan, owner: Object) -> list[PoolOutcome]:
    return [o for name, o in plan.outcomes.items() if uid_of(picture.owners[name]) == uid_of(owner)]


def _condition(verdict: Verdict) -> Object:
    return condition(verdict.type, verdict.holds, verdict.reason, verdict.message)


def _ready(
    findings: Sequence[Finding], serving: Object, pools: Sequence[tuple[PoolOutcome, Verdict]]
) -> Object:
    if findings:
        return condition("Ready", False, findings[0].reason, "; ".join(f.message for f in findings))
    if serving["status"] != "True":
        return condition("Ready", False, serving["reason"], serving["message"])
    for outcome, available in pools:
        if not available.holds:
            message = f"pool {outcome.pool.name}: {available.message}"
            return condition("Ready", False, available.reason, message)
    if not any(outcome.pool.gated for outcome, _ in pools):
        return condition("Ready", False, reasons.NO_POOLS, "no prefill or decode pool; write prefillPools")
    return condition("Ready", True, reasons.POOLS_AVAILABLE)


def _scheduler_ready(scheduler: Object | None) -> Object:
    if scheduler is None:
        return condition("SchedulerReady", False, reasons.SCHEDULER_ABSENT, "there is no scheduler yet")
    status, wanted = scheduler.get("status") or {}, scheduler["spec"].get("replicas", 1)
    available, updated = status.get("availableReplicas", 0), status.get("updatedReplicas", 0)
    message = f"{available} of {wanted} schedulers are available"
    if status.get("observedGeneration") == scheduler["metadata"].get("generation") and updated < wanted:
        message += f", {updated} have the newest configuration"
    if available:
        return condition("SchedulerReady", True, reasons.SCHEDULER_AVAILABLE, message)
    # Why Pods could not be made is the one thing that the Deployment knows better than its numbers.
    failed: Object = next((c for c in status.get("conditions") or () if c["type"] == "ReplicaFailure"), {})
    message += f"; {failed['message']}" if failed.get("message") else ""
    return condition("SchedulerReady", False, reasons.SCHEDULER_UNAVAILABLE, message)


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
    return sorted(found, key=lambda item: (str(item["kind"]), str(item["name"])))
