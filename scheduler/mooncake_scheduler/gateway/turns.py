"""Prefills that wait for their turn: held in the gateway, handed over when their instance is nearly free.

Whose turn it is follows from the ledger alone (`conductor/order.py`), so several schedulers agree without
asking each other. A mirror of the ledger is up to 100 ms old: the next is handed over so much before the
instance is free, or it would stand idle between the prefills of two schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mooncake_core.ledger import Ledger, Waiting
from mooncake_core.registry import InstanceState
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.gateway.breaker import BreakerState
from mooncake_scheduler.gateway.flow import Flow, park
from mooncake_scheduler.gateway.roster import Member, Roster

if TYPE_CHECKING:
    from mooncake_scheduler.conductor.rebinding import Move
    from mooncake_scheduler.gateway.rebinding import Binding

LEAD_S = 0.1
"""Wall seconds before an instance is free at which the next prefill is handed to it."""
MIRROR_S = 0.1
"""Wall seconds after which a mirror shows what the ledger knows."""
PATIENCE_S = 0.25
"""Wall seconds for which an instance is left idle for a peer's prefill whose turn it is: longer than it takes
to hear of its hand-over, and far shorter than it takes to notice that the peer died."""


class InLine:
    """A request that waits."""

    __slots__ = (
        "binding", "flow", "handed_over", "left", "member", "move", "not_before_s", "queue_s", "reservation",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, flow: Flow, member: Member, reservation: str, waiting: Waiting, binding: Binding | None
    ) -> None:
        self.flow = flow
        self.member = member
        self.reservation = reservation
        self.waiting = waiting
        self.binding = binding
        self.handed_over = False
        self.left = False
        """Its instance takes no more work from this gateway."""
        self.move: Move | None = None
        """Another instance that is offered to it."""
        self.not_before_s = 0.0
        self.queue_s = 0.0


class Turns:
    """Who of this gateway waits at which instance.

    Args:
        order: whose turn it is.
        ledger: who waits, and what was handed over.
        roster: which instances are there.
        clock: model seconds.
        monotonic: wall seconds.
    """

    def __init__(
        self,
        order: QueueOrder,
        ledger: Ledger,
        roster: Roster,
        clock: Clock,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order = order
        self._ledger = ledger
        self._roster = roster
        self._clock = clock
        self._monotonic = monotonic
        self._held: dict[str, list[InLine]] = {}
        self._idle_since_s: dict[str, float] = {}
        """Since when an instance is left idle for somebody else's prefill."""

    @property
    def held(self) -> int:
        """Requests that wait."""
        return sum(len(held) for held in self._held.values())

    @property
    def lines(self) -> Mapping[str, Sequence[InLine]]:
        """Who waits, by instance."""
        return self._held

    async def wait(
        self,
        flow: Flow,
        member: Member,
        reservation: str,
        waiting: Waiting,
        binding: Binding | None = None,
    ) -> float | Move | None:
        """Wait for a turn; the ledger knows of it when this returns.

        Args:
            flow: of the request.
            member: where it waits.
            reservation: its id.
            waiting: as the ledger has it.
            binding: what another instance is offered by; None = it stays where it is.

        Returns:
            Model seconds of work that the instance still has. Or another instance that is offered: it still
            waits here, and is out of line until it waits again. None = its instance is gone.

        Raises:
            Interruption: the client left, or the wait took too long. The reservation still is to be released.
        """
        instance_id = member.instance.id
        held = InLine(flow, member, reservation, waiting, binding)
        load = self._ledger.load(instance_id, self._clock.now_s())
        if binding is not None and binding.turn_from_s is not None:
            # It is back from an offer: what the mirror had to hear of when it came has not become younger.
            held.not_before_s = binding.turn_from_s
        elif load.queued == len(load.waiting):
            # The ledger let it wait, and the mirror shows nobody at work: it has not heard of them yet.
            held.not_before_s = self._monotonic() + MIRROR_S
        if binding is not None:
            binding.turn_from_s = held.not_before_s
        self._held.setdefault(instance_id, []).append(held)
        try:
            self.look(instance_id)
            while not (held.handed_over or held.left or held.move is not None):
                await park()
        finally:
            if not held.handed_over:
                self._forget(instance_id, held)
        return held.queue_s if held.handed_over else held.move

    def offer(self, held: InLine, move: Move) -> None:
        """Offer another instance to one that waits: it leaves the line to be moved there."""
        held.move = move
        self._forget(held.member.instance.id, held)
        held.flow.wake()

    def look_everywhere(self) -> None:
        """See whose turn it is at all instances; call it at least as often as `LEAD_S` / 2."""
        for instance_id in list(self._held):
            self.look(instance_id)

    def look(self, instance_id: str) -> None:
        """See whose turn it is at one instance, and hand over what is this gateway's."""
        while (held := self._next(instance_id)) is not None:
            held.queue_s = self._ledger.load(instance_id, self._clock.now_s()).handed_over_s
            self._ledger.prefill_begun(held.reservation, self._clock.now_s())
            held.handed_over = True
            self._forget(instance_id, held)
            held.flow.wake()

    def _next(self, instance_id: str) -> InLine | None:
        all_held = self._held.get(instance_id)
        if not all_held:
            return None
        if self._leave(instance_id, all_held):
            return None
        now_s = self._clock.now_s()
        load = self._ledger.load(instance_id, now_s)
        chosen = self._order.turn(load, now_s, LEAD_S * self._clock.scale)
        if chosen is None:
            self._idle_since_s.pop(instance_id, None)
            return None
        mine = next((held for held in all_held if held.waiting == chosen), None)
        if mine is not None and self._monotonic() < mine.not_before_s:
            return None
        if mine is not None:
            self._idle_since_s.pop(instance_id, None)
            return mine
        # A peer's. It may be slow, or dead and not yet reaped: the instance must not stand idle for it.
        idle_since_s = self._idle_since_s.setdefault(instance_id, self._monotonic())
        if self._monotonic() - idle_since_s < PATIENCE_S:
            return None
        own = {held.waiting: held for held in all_held}
        return own[self._order.sequence(list(own), now_s)[0]]

    def _leave(self, instance_id: str, all_held: list[InLine]) -> bool:
        """Let everybody go who waits at an instance that is gone or fails; True where that is so."""
        member = self._roster.members.get(instance_id)
        now_s = self._monotonic()
        leaving = [h for h in all_held if member is not h.member or not serves(h.member, now_s)]
        # All are out of line before the first is woken: what it does next looks at the line again.
        for held in leaving:
            held.left = True
            self._forget(instance_id, held)
        nobody_stays = not all_held
        for held in leaving:
            held.flow.wake()
        return nobody_stays

    def _forget(self, instance_id: str, held: InLine) -> None:
        all_held = self._held.get(instance_id, [])
        if held in all_held:
            all_held.remove(held)
        if not all_held:
            self._held.pop(instance_id, None)
            self._idle_since_s.pop(instance_id, None)


def serves(member: Member, now_s: float) -> bool:
    """Whether what waits for an instance may go on waiting, at a moment in monotonic seconds.

    One that drains finishes what it was promised. One whose breaker lets somebody try again is tried.
    """
    breaker = member.breaker
    return member.state in (InstanceState.READY, InstanceState.DRAINING) and (
        breaker.state is not BreakerState.OPEN or breaker.admits(now_s)
    )
