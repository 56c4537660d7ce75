"""The readiness gate `mooncake.io/routable`: who is used by the schedulers, and who is being emptied.

The gate latches. A registration with ready containers sets it; a drain or a deregistration clears it;
silence of schedulers or Redis changes nothing. Cleared with the reason `Draining` it is also the memory of
a decision: this instance was chosen to go, and when. The order of the two writes matters to whoever is
killed between them: the gate before the mark, the unmark before the gate, so that what is left is always
read as "still draining".
"""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_core.registry import InstanceState
from mooncake_operator.planning import reasons
from mooncake_operator.planning.actions import Action, MarkDrain, SetGate, Unmark
from mooncake_operator.planning.instances import Instance, Phase
from mooncake_operator.planning.observed import Observed

_SETTLED_BY_ITSELF = frozenset({Phase.STARTING, Phase.READY, Phase.ROUTABLE})


def settle_gate(instance: Instance, observed: Observed) -> Iterator[Action]:
    """Bring the gate of an instance that nobody wants to drain in line with what the schedulers know."""
    leader = instance.leader
    if leader is None or observed.registry is None or instance.phase not in _SETTLED_BY_ITSELF:
        return
    wanted = _wanted(instance)
    if wanted is None or (leader.gate is not None and leader.gate.status == wanted[0]):
        return
    status, reason = wanted
    if status or leader.gate is not None:
        yield SetGate(leader.name, leader.uid, status, reason)


def _wanted(instance: Instance) -> tuple[bool, str] | None:
    registration = instance.registration
    containers_ready = instance.phase is not Phase.STARTING
    if registration is None:
        # A registry that lost its memory knows nobody, and a probe may be late at that very moment; a goodbye
        # comes with containers that end.
        ended = any(pod.containers_ended for pod in instance.pods)
        return (False, reasons.NOT_REGISTERED) if ended else None
    if registration.state is InstanceState.DRAINING:
        return (False, reasons.MARKED_BY_USER)
    if registration.state is InstanceState.READY and containers_ready:
        return (True, reasons.REGISTERED)
    return None


def begin_drain(instance: Instance, reason: str, message: str) -> Iterator[Action]:
    """Choose an instance to go."""
    yield from close(instance, reason, message)
    if instance.registration is not None:
        yield MarkDrain(instance.name)


def close(instance: Instance, reason: str, message: str) -> Iterator[Action]:
    """Write down, at its leader, that an instance was chosen to go."""
    leader = instance.leader
    if leader is not None and instance.pool.gated:
        yield SetGate(leader.name, leader.uid, False, reasons.DRAINING, f"{reason}: {message}")


def keep_draining(instance: Instance) -> Iterator[Action]:
    """Say it again to schedulers that have not heard it."""
    registration = instance.registration
    if registration is not None and registration.state is not InstanceState.DRAINING:
        yield MarkDrain(instance.name)


def end_drain(instance: Instance) -> Iterator[Action]:
    """Keep an instance after all."""
    leader = instance.leader
    if leader is None:
        return
    if instance.registration is not None:
        yield Unmark(instance.name)
    ready = instance.registration is not None and all(pod.containers_ready for pod in instance.pods)
    yield SetGate(leader.name, leader.uid, ready, reasons.REGISTERED if ready else reasons.NOT_REGISTERED)


def drain_deadline_s(instance: Instance, since_s: float) -> float:
    """When its work in flight may be cut."""
    return since_s + instance.pool.drain_timeout_s


def is_empty(instance: Instance, observed: Observed) -> bool:
    """Whether the schedulers say that nothing is left on a draining instance."""
    if observed.registry is None:
        return False
    registration = instance.registration
    if registration is None:
        return True
    return registration.state is InstanceState.DRAINING and registration.in_flight == 0
