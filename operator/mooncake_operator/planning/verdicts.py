"""The conditions of a pool: named questions, each answered from what is wanted and what is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooncake_core.registry import Role
from mooncake_operator.planning import reasons, troubles
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.desired import DesiredCluster, DesiredPool
from mooncake_operator.planning.history import last_progress_s
from mooncake_operator.planning.instances import Instance, Phase, foreigners
from mooncake_operator.planning.observed import Observed, ObservedPod
from mooncake_operator.planning.plan import PoolOutcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition without the fields that depend on the one before."""

    type: str
    holds: bool | None
    """None = unknown."""
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Case:
    """What every question about a pool is asked of."""

    pool: DesiredPool
    live: Sequence[Instance]
    outcome: PoolOutcome
    observed: Observed
    deadline_s: float
    refusals: Sequence[Finding]

    @property
    def pods(self) -> Sequence[ObservedPod]:
        return [pod for instance in self.live for pod in instance.pods]

    @property
    def routable(self) -> int:
        return sum(i.routable for i in self.live)

    @property
    def updated(self) -> int:
        return sum(i.updated for i in self.live)

    @property
    def updated_routable(self) -> int:
        return sum(i.updated and i.routable for i in self.live)

    @property
    def complete(self) -> bool:
        """Whether everything wanted is there, in the revision it should have."""
        wanted = self.pool
        return (
            len(self.live) == wanted.replicas == self.routable
            and self.updated_routable >= wanted.updated_target
        )

    @property
    def sufficient(self) -> bool:
        """Whether what is wanted works; there may be more, on its way out."""
        wanted = self.pool
        return (
            self.routable >= wanted.replicas
            and self.updated_routable >= wanted.updated_target
            and len(self.live) - self.updated <= wanted.partition
        )

    @property
    def trouble(self) -> Finding | None:
        """What somebody must mend before the pool gets on."""
        return next(
            (
                found
                for found in (
                    *self.refusals,
                    troubles.scheduling(self.pods),
                    troubles.starting(self.pods),
                    _crashes(self.outcome),
                    self.outcome.stuck,
                )
                if found is not None
            ),
            None,
        )


def pool_verdicts(
    cluster: DesiredCluster, outcome: PoolOutcome, observed: Observed, refusals: Sequence[Finding] = ()
) -> list[Verdict]:
    """All conditions of one pool.

    Args:
        cluster: what is wanted.
        outcome: of the plan.
        observed: the picture that was planned on.
        refusals: why Pods could not be made just now; see `planning.refusals`.
    """
    live = [instance for instance in outcome.instances if instance.live]
    case = _Case(outcome.pool, live, outcome, observed, cluster.progress_deadline_s, refusals)
    found = [_available(case), _progressing(case), _degraded(case), _scheduled(case)]
    return [*found, _fabric(case, cluster.protocol)]


def ratio_verdict(cluster: DesiredCluster, outcomes: Sequence[PoolOutcome]) -> Verdict | None:
    """`RatioSatisfied` of the cluster; None where no ratio is asked for."""
    ratio = cluster.ratio
    if ratio is None:
        return None
    prefill, decode = (
        sum(i.routable for o in outcomes if o.pool.role is role for i in o.instances)
        for role in (Role.PREFILL, Role.DECODE)
    )
    bounds = f"{ratio.min_prefill_per_decode or '0'} to {ratio.max_prefill_per_decode or 'any'}"
    message = f"{prefill} prefill and {decode} decode instances are routable; wanted are {bounds} per decode"
    holds = ratio.allows(prefill, decode)
    return Verdict("RatioSatisfied", holds, reasons.RATIO_KEPT if holds else reasons.RATIO_VIOLATED, message)


def _available(case: _Case) -> Verdict:
    """Whether all that is wanted works. Old instances do not pass for new ones (Dynamo issue 3567)."""
    wanted = case.pool
    counts = f"{case.routable} of {wanted.replicas} instances are routable"
    if case.pool.deleted_s is not None:
        return Verdict("Available", False, reasons.DELETING, counts)
    if case.sufficient:
        return Verdict("Available", True, reasons.AVAILABLE, counts)
    if case.trouble is not None:
        return Verdict("Available", False, case.trouble.reason, f"{counts}; {case.trouble.message}")
    if case.updated_routable < wanted.updated_target and case.updated < len(case.live):
        message = f"{counts}, {case.updated_routable} of {wanted.updated_target} with the newest revision"
        return Verdict("Available", False, reasons.ROLLING_OUT, message)
    return Verdict("Available", False, reasons.TOO_FEW_ROUTABLE, f"{counts}; {_phases(case)}")


def _progressing(case: _Case) -> Verdict:
    wanted = case.pool
    if wanted.deleted_s is not None:
        return Verdict(
            "Progressing", True, reasons.DELETING, f"{len(case.outcome.instances)} are still there"
        )
    outdated = len(case.live) - case.updated
    if case.complete:
        held = f"; {outdated} stay at their revision (update.partition)" if outdated else ""
        return Verdict("Progressing", False, reasons.COMPLETE, f"{case.updated} are updated{held}")
    if wanted.paused and outdated:
        message = f"update.paused; {case.updated} of {wanted.updated_target} are updated"
        return Verdict("Progressing", False, reasons.PAUSED, message)
    if case.outcome.stuck is not None:
        return Verdict("Progressing", False, case.outcome.stuck.reason, case.outcome.stuck.message)
    blocked = f"; {case.outcome.blocked.message}" if case.outcome.blocked else ""
    history = case.observed.history(wanted.name)
    now_s = case.observed.now_s
    idle_s = now_s - last_progress_s(case.outcome.instances, history, now_s)
    if history.update_revision == wanted.revision and idle_s > case.deadline_s:
        trouble = f"; {case.trouble.message}" if case.trouble else blocked
        message = f"no progress for {case.deadline_s:.0f} s (progressDeadlineSeconds){trouble}"
        return Verdict("Progressing", False, reasons.DEADLINE_EXCEEDED, message)
    if outdated > wanted.partition:
        message = f"{case.updated_routable} of {wanted.updated_target} are updated and routable{blocked}"
        return Verdict("Progressing", True, reasons.ROLLING_OUT, message)
    message = f"{case.routable} of {wanted.replicas} are routable{blocked}"
    return Verdict("Progressing", True, reasons.SCALING, message)


def _degraded(case: _Case) -> Verdict:
    findings = [
        *case.refusals,
        *(f for f in (_crashes(case.outcome), _stuck(case), _strangers(case)) if f is not None),
    ]
    started = troubles.starting(case.pods)
    if started is not None:
        findings.append(started)
    if not findings:
        return Verdict("Degraded", False, reasons.HEALTHY)
    return Verdict("Degraded", True, findings[0].reason, "; ".join(f.message for f in findings))


def _scheduled(case: _Case) -> Verdict:
    objection = troubles.scheduling(case.pods)
    if objection is not None:
        return Verdict("Scheduled", False, objection.reason, objection.message)
    if not case.pods:
        return Verdict("Scheduled", None, reasons.NO_PODS, "there are no Pods yet")
    return Verdict("Scheduled", True, reasons.SCHEDULED)


def _fabric(case: _Case, protocol: str) -> Verdict:
    """What can be told of the network without looking at the nodes."""
    if protocol == "TCP":
        return Verdict("FabricReady", True, reasons.FABRIC_TCP, "KV travels over TCP (network.protocol)")
    objection = troubles.scheduling(case.pods)
    if objection is not None and objection.reason == reasons.INSUFFICIENT_RDMA:
        return Verdict("FabricReady", False, objection.reason, objection.message)
    message = "no node agent reports on the NICs of this pool's nodes"
    return Verdict("FabricReady", None, reasons.FABRIC_UNREPORTED, message)


def _crashes(outcome: PoolOutcome) -> Finding | None:
    again = [record for record in outcome.recreations if record.failures > 1]
    if not again:
        return None
    worst = max(again, key=lambda record: record.failures)
    return Finding(
        reasons.BACKING_OFF,
        f"{worst.instance} failed {worst.failures} times in a row, the last time: {worst.message}",
    )


def _stuck(case: _Case) -> Finding | None:
    lost = [i.name for i in case.outcome.instances if i.phase is Phase.LOST]
    if not lost:
        return None
    return Finding(
        reasons.NOT_TERMINATING,
        f"{', '.join(lost)} should have ended long ago: is the node alive?"
        " delete the Node, or the Pod with --force, once you know that it does not run",
    )


def _strangers(case: _Case) -> Finding | None:
    found = [pod.name for pod in foreigners(case.pool, case.observed)]
    if not found:
        return None
    return Finding(
        reasons.FOREIGN_POD,
        f"Pod {', '.join(found)} has this pool's label or name and another owner;"
        " it is left alone, remove it or its label",
    )


def _phases(case: _Case) -> str:
    def parts() -> Iterator[str]:
        for phase in Phase:
            number = sum(i.phase is phase for i in case.outcome.instances)
            if number and phase is not Phase.ROUTABLE:
                yield f"{number} {phase.value}"

    return ", ".join(parts()) or "none is there yet"
