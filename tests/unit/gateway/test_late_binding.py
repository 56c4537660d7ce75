"""Looking for instances that run out of work: by all that is known of them, and at a bounded cost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from mooncake_core.config.scheduler import SloConfig
from mooncake_core.ledger import Limits, Reservation
from mooncake_core.ledger.memory import MemoryLedger
from mooncake_core.registry import Instance, InstanceState
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.model import Ask, World
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.conductor.placement import PrefillEstimate
from mooncake_scheduler.conductor.rebinding import Move, Rebinding
from mooncake_scheduler.conductor.reports import Foreign
from mooncake_scheduler.gateway import rebinding, turns
from mooncake_scheduler.gateway.flow import Flow
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.rebinding import MOST_CANDIDATES, REST_S, Binding, LateBinding
from mooncake_scheduler.gateway.turns import MIRROR_S, InLine, Turns
from mooncake_scheduler.gateway.worlds import Worlds
from mooncake_scheduler.policies.kv_centric import KvCentric
from mooncake_testing.worlds import ROUND_COSTS, Script, ask, decode, prefill, world

POLICY = KvCentric()


class Gateway:
    """What late binding sees of a gateway: `idle` has nothing to do, at `busy` some wait."""

    def __init__(self, *, idle_domain: str = "a", gain: bool = True) -> None:
        self.gain = gain
        self.looked_at = 0
        self.offers: list[tuple[InLine, Move]] = []
        self.moved: Any = True
        self.idle = _instance("idle", idle_domain)
        self.busy = _instance("busy", "a")
        self.decode = replace(decode("d").instance, topology_domain="a", connector="MooncakeConnector")
        self.members: dict[str, Any] = {
            each.id: SimpleNamespace(
                instance=each,
                state=InstanceState.READY,
                breaker=SimpleNamespace(state=None),
                inbound_flows=0,
            )
            for each in (self.idle, self.busy)
        }
        roster: Any = SimpleNamespace(members=self.members, source_flows={})
        self.clock = Clock(1.0)
        self.ledger = MemoryLedger()
        self.order = QueueOrder()
        conductor: Any = SimpleNamespace(costs=CostModels(default=ROUND_COSTS), reservation=self._reservation)
        worlds = Worlds(conductor, roster, self.ledger, self.clock, SloConfig())
        self.placer = Placer(conductor, roster, self.clock, worlds)
        self.wall_s = time.monotonic()
        self.turns = Turns(self.order, self.ledger, roster, self.clock, lambda: self.wall_s)
        self.late = LateBinding(
            Rebinding(self._prefill_at, self.order), self.turns, self.placer, roster, self.ledger, self.clock
        )

    def _prefill_at(self, asked: Ask, there: World) -> PrefillEstimate:
        self.looked_at += 1
        found = POLICY.prefill_at(asked, there)
        return found if self.gain else replace(found, ttft_s=1e6)

    def _reservation(self, asked: Ask, placement: Any, reserved_s: float) -> Reservation:
        return Reservation(asked.id, placement.prefill.id, 1.0, "d", 1, reserved_s, reserved_s + 1)

    async def wait(self, count: int, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        """Let so many wait at `busy`; with `monkeypatch` offers are only noted."""
        now_s = self.clock.now_s()
        busy = Reservation("computing", "busy", 50.0, "d", 1, now_s, now_s + 1)
        assert await self.ledger.reserve(busy, Limits(), now_s) is None
        for number in range(count):
            await self.join(f"r{number}")
        if monkeypatch is not None:
            monkeypatch.setattr(self.turns, "offer", lambda *offer: self.offers.append(offer))

    async def join(self, name: str) -> None:
        now_s = self.clock.now_s()
        mine = Reservation(name, "busy", 1.0, "d", 1, now_s, now_s + 1, waits_above_s=0.1)
        assert await self.ledger.reserve(mine, Limits(), now_s) is None
        asked = replace(ask(1_000), id=name)
        placement = POLICY.place(asked, world([prefill("busy")]), Script())
        binding = Binding(asked, replace(placement, prefill=self.busy, decode=self.decode), {})

        async def waits() -> None:
            waiting = self.ledger.waiting(name)
            assert waiting is not None
            found = await self.turns.wait(flow, self.members["busy"], name, waiting, binding)
            while isinstance(found, Move):
                await self.late.take(binding, found, self.wall_s)
                found = await self.turns.wait(flow, self.members["busy"], name, waiting, binding)

        errors: list[BaseException] = []
        flow = Flow(waits(), lambda _: None, errors.append)
        flow.start()
        assert errors == []


def _instance(name: str, domain: str) -> Instance:
    return replace(prefill(name).instance, topology_domain=domain, connector="MooncakeConnector")


async def test_an_instance_that_is_busy_for_strangers_is_not_one_that_runs_out_of_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    await gateway.wait(3, monkeypatch)
    gateway.placer.worlds.reported.foreign = {"idle": Foreign(5, 30.0, 0, 10_000)}
    gateway.late.look(gateway.wall_s)
    assert gateway.offers == []
    gateway.placer.worlds.reported.foreign = {}
    gateway.late.look(gateway.wall_s)
    assert [move.placement.prefill for _, move in gateway.offers] == [gateway.idle]


async def test_what_strangers_still_have_to_do_counts_where_somebody_is_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    await gateway.wait(3, monkeypatch)
    gateway.placer.worlds.reported.foreign = {"idle": Foreign(1, 0.05, 0, 0)}
    gateway.late.look(gateway.wall_s)
    ((held, move),) = gateway.offers
    waited_s = gateway.clock.now_s() - held.waiting.reserved_s
    assert move.placement.queue_s - waited_s == pytest.approx(0.05, abs=0.02)


async def test_an_instance_that_a_prefill_is_just_being_reserved_at_is_not_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    await gateway.wait(3, monkeypatch)
    now_s = gateway.clock.now_s()
    with gateway.placer.worlds.asking(Reservation("new", "idle", 2.0, "d", 1, now_s, now_s + 1)):
        gateway.late.look(gateway.wall_s)
    assert gateway.offers == []


async def test_a_look_costs_no_more_with_a_long_line_and_is_not_repeated_at_once_where_nobody_gains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway(gain=False)
    await gateway.wait(3 * MOST_CANDIDATES, monkeypatch)
    gateway.late.look(gateway.wall_s)
    assert gateway.looked_at == MOST_CANDIDATES
    gateway.late.look(gateway.wall_s + REST_S / 2)
    assert gateway.looked_at == MOST_CANDIDATES
    gateway.gain = True
    gateway.late.look(gateway.wall_s + 1.5 * REST_S)
    assert len(gateway.offers) == 1


async def test_those_who_cannot_be_computed_there_take_nobodys_place_and_cost_no_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway(idle_domain="b")
    await gateway.wait(3, monkeypatch)
    views: list[object] = []
    monkeypatch.setattr(gateway.placer.worlds, "_view", lambda *seen: views.append(seen))
    gateway.late.look(gateway.wall_s)
    assert (gateway.offers, gateway.looked_at, views) == ([], 0, [])


async def test_while_the_ledger_is_away_all_but_one_stay_in_line_and_soon_that_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    await gateway.wait(10)
    asked = []

    async def away(*move: object) -> bool:
        asked.append(move)
        raise ConnectionError

    monkeypatch.setattr(gateway.ledger, "move", away)
    for look in range(20):
        gateway.late.look(gateway.wall_s + look * 0.02)
    assert len(asked) == 1
    assert gateway.turns.held == 10
    gateway.late.look(gateway.wall_s + rebinding.AWAY_S + 0.5)
    assert len(asked) == 2


async def test_who_is_back_from_an_offer_that_failed_waits_no_longer_for_the_mirror(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = Gateway()
    now_s = gateway.clock.now_s()
    busy = Reservation("computing", "busy", 50.0, "d", 1, now_s, now_s + 1)
    assert await gateway.ledger.reserve(busy, Limits(), now_s) is None
    waiting = Reservation("mine", "busy", 1.0, "d", 1, now_s, now_s + 1, waits_above_s=0.1)
    assert await gateway.ledger.reserve(waiting, Limits(), now_s) is None
    # The mirror has lost sight of who computes.
    gateway.ledger.release("computing", now_s)
    monkeypatch.setattr(turns, "PATIENCE_S", 1e6)
    mine = gateway.ledger.waiting("mine")
    assert mine is not None
    asked = ask(1_000)
    placement = replace(
        POLICY.place(asked, world([prefill("busy")]), Script()), prefill=gateway.busy, decode=gateway.decode
    )
    binding = Binding(asked, placement, {})
    found: list[object] = []

    async def waits() -> None:
        for _ in range(2):
            found.append(await gateway.turns.wait(flow, gateway.members["busy"], "mine", mine, binding))

    flow = Flow(waits(), lambda _: None, lambda error: found.append(error))
    flow.start()
    gateway.wall_s += 0.9 * MIRROR_S
    gateway.turns.offer(gateway.turns.lines["busy"][0], Move(1.0, placement))
    gateway.wall_s += 0.2 * MIRROR_S
    gateway.turns.look_everywhere()
    assert len(found) == 2
