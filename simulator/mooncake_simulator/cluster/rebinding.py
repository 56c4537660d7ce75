"""Late binding on a simulated cluster: who waits at one instance may be computed by another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mooncake_scheduler.conductor.rebinding import MOST_MOVES, Move, Rebinding
from mooncake_simulator.cluster.prefill import Job
from mooncake_simulator.cluster.prefixes import Prefix
from mooncake_simulator.cluster.turns import OrderedQueue

if TYPE_CHECKING:
    from mooncake_simulator.cluster.life import Life
    from mooncake_simulator.cluster.simulation import Simulation


class _Best(NamedTuple):
    move: Move
    queue: OrderedQueue
    job: Job
    life: Life
    prefix: Prefix


class LateBinding:
    """Looks for work that waits elsewhere when an instance runs out of it.

    Args:
        world: where that is.
        rebinding: decides.
    """

    def __init__(self, world: Simulation, rebinding: Rebinding) -> None:
        self._world = world
        self._rebinding = rebinding

    def look(self, number: int) -> None:
        """An instance may have nothing to do, for a prefill ended or it is back: one that waits may come."""
        world = self._world
        own = world.queues[number]
        if own.occupied or world.prefill[number].id not in world.present_prefill:
            return
        best: _Best | None = None
        for other, queue in enumerate(world.queues):
            if isinstance(queue, OrderedQueue) and queue.waiting:
                found = self._best_of(other, queue, number)
                if found is not None and (best is None or found.move.worth_s > best.move.worth_s):
                    best = found
        if best is not None:
            best.queue.leave(best.job)
            best.life.move(best.move.placement, best.prefix)

    def _best_of(self, other: int, queue: OrderedQueue, number: int) -> _Best | None:
        world, rebinding, now_s = self._world, self._rebinding, self._world.agenda.now_s
        standings = rebinding.standings(world.board.load(world.prefill[other].id, now_s), now_s)
        best: _Best | None = None
        for job in queue.waiting:
            life, waiting = job.life, job.waiting
            if life is None or waiting is None or life.moves >= MOST_MOVES:
                continue
            there, prefix = world.look_at(life.request, number)
            move = rebinding.move(
                life.ask, life.placement, waiting, standings[waiting], there, world.costs, now_s
            )
            if move is not None and (best is None or move.worth_s > best.move.worth_s):
                best = _Best(move, queue, job, life, prefix)
        return best
