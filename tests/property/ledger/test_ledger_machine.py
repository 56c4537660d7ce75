"""One state machine for both ledgers: whatever schedulers do, crash or forget, the books are right."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import count
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from msgspec.structs import replace

from mooncake_core.ledger import (
    InstanceLoad,
    Limits,
    MemoryLedger,
    RedisLedger,
    RefusalReason,
    Reservation,
    SeatLimits,
)
from mooncake_core.ledger.contract import BUCKET_S
from mooncake_core.resp import RespClient
from mooncake_testing.redis import RedisServer

PREFILLS = ["p0", "p1"]
DECODES = ["d0", "d1"]
PREFIX = "{test}:"


def an_ask(chance: Random) -> dict[str, Any]:
    """Arguments of one reservation.

    Times are multiples of 1/8 s, so that sums of them are exact and the model need not round. Bounds are at,
    just below and above what is there: that is where a wrong count shows.
    """
    return {
        "who": chance.randrange(3),
        "prefill": chance.choice([*PREFILLS, None]),
        "decode": chance.choice(DECODES),
        "cost_s": chance.randint(1, 40) / 8,
        "kv": chance.randint(1, 50),
        "delay_s": chance.randint(0, 40) / 8,
        "lasts_s": chance.randint(0, 40) / 8,
        "queue_slack_s": chance.choice([inf, inf, 1.0, 0.0, -1 / 8]),
        "batch_slack": chance.choice([None, None, None, 0, -1]),
        "kv_slack": chance.choice([None, None, None, 0, -1]),
        "waits_above_s": chance.choice([inf, inf, 0.0, 2.0]),
        "promised_s": chance.choice([inf, 0.0, 5.0]),
    }


@dataclass
class Held:
    """What the model knows of one reservation."""

    reservation: Reservation
    reserved_s: float
    begun_s: float
    prefilling: bool = True
    is_held: bool = False
    decode_end_s: float = 0.0

    @property
    def decoding(self) -> bool:
        return not (self.prefilling or self.is_held)

    @property
    def queue(self) -> str:
        return self.reservation.prefill or self.reservation.decode


@dataclass
class Scheduler:
    ledger: MemoryLedger | RedisLedger
    client: RespClient | None = None
    held: dict[str, Held] = field(default_factory=dict)
    present: bool = True
    """Whether the shared state knows what it holds."""


class LedgerMachine(RuleBasedStateMachine):
    """Drives schedulers and a model of them; subclasses say where the ledger lives."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.ids = count()
        self.since: dict[str, float] = {}
        self.blurred: set[str] = set()
        """Instances at which it is not known exactly since when the oldest prefill runs."""
        self.schedulers: list[Scheduler] = []

    @initialize()
    def schedulers_begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.schedulers = self.begin()

    def begin(self) -> list[Scheduler]:
        return [Scheduler(MemoryLedger())]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def settle(self, scheduler: Scheduler) -> None:
        """Wait until all that a scheduler posted has arrived."""
        if scheduler.client is not None:
            self.run(scheduler.client.call("PING"))

    # What the shared state should know, by the model.

    def known(self) -> list[Held]:
        return [held for s in self.schedulers if s.present for held in s.held.values()]

    def queue(self, instance: str, held: list[Held] | None = None) -> list[Held]:
        waiting = [
            h for h in (self.known() if held is None else held) if h.prefilling and h.queue == instance
        ]
        return sorted(waiting, key=lambda h: (h.begun_s, h.reserved_s))

    def under_way(self, instance: str) -> list[Held]:
        return [h for h in self.queue(instance) if h.begun_s < inf]

    def queued_s(self, instance: str) -> float:
        queue = self.queue(instance)
        if not queue:
            return 0.0
        total_s = sum(h.reservation.prefill_cost_s for h in queue)
        head = queue[0]
        if head.begun_s == inf:
            return total_s
        ran_s = self.now_s - max(head.begun_s, self.since.get(instance, 0.0))
        return total_s - min(head.reservation.prefill_cost_s, ran_s)

    def changing_heads(self) -> dict[str, Held | None]:
        return {i: next(iter(self.under_way(i)), None) for i in PREFILLS + DECODES}

    def heads_changed(self, before: dict[str, Held | None]) -> None:
        for instance, head in before.items():
            is_now = next(iter(self.under_way(instance)), None)
            if is_now is None:
                self.since.pop(instance, None)
                self.blurred.discard(instance)
            elif head is not None and is_now is not head:
                self.since[instance] = self.now_s

    def returns(self, scheduler: Scheduler) -> None:
        if not scheduler.present:
            scheduler.present = True
            self.blurred.update(h.queue for h in scheduler.held.values())

    # What happens.

    @rule(step=st.integers(1, 20))
    def time_passes(self, step: int) -> None:
        self.now_s += step / 8

    def reserve(
        self, who: int, prefill: str | None, decode: str, cost_s: float, kv: int, delay_s: float,
        lasts_s: float, queue_slack_s: float, batch_slack: int | None, kv_slack: int | None,
        waits_above_s: float, promised_s: float,
    ) -> None:  # fmt: skip
        scheduler = self.schedulers[who % len(self.schedulers)]
        self.now_s += 1 / 8
        self.returns(scheduler)
        arrives_s = self.now_s + delay_s
        name = f"r{next(self.ids)}"
        there = [h for h in self.known() if h.reservation.decode == decode]
        tokens = sum(h.reservation.kv_tokens for h in there)
        queued_s = self.queued_s(prefill or decode)
        if prefill in self.blurred or decode in self.blurred:
            queued_s = sum(h.reservation.prefill_cost_s for h in self.queue(prefill or decode))
            queue_slack_s = max(queue_slack_s, 0.0)
            waits_above_s = inf
        wanted = Reservation(
            name, prefill, cost_s, decode, kv, arrives_s, arrives_s + lasts_s,
            waits_above_s=waits_above_s, latest_end_s=self.now_s + promised_s, prefill_tokens=1 + kv // 2,
        )  # fmt: skip
        others_wait = any(h.begun_s == inf for h in self.queue(prefill or decode))
        waits = waits_above_s < inf and (others_wait or queued_s > waits_above_s)
        limits = Limits(
            queued_s=queued_s + cost_s + queue_slack_s,
            batch=0 if batch_slack is None else len(there) + 1 + batch_slack,
            kv_tokens=0 if kv_slack is None else tokens + kv + kv_slack,
        )
        expected = None
        if queue_slack_s < 0:
            expected = RefusalReason.TTFT
        elif limits.batch and batch_slack == -1:
            expected = RefusalReason.TBT
        elif limits.kv_tokens and kv_slack == -1:
            expected = RefusalReason.KV_MEMORY
        assert self.run(scheduler.ledger.reserve(wanted, limits, self.now_s)) == expected
        if expected is None:
            begun_s = inf if waits else self.now_s
            scheduler.held[wanted.id] = Held(wanted, self.now_s, begun_s, decode_end_s=wanted.decode_end_s)

    @rule(seed=st.integers(0, 1 << 32), many=st.integers(1, 4))
    def requests_come(self, seed: int, many: int) -> None:
        chance = Random(seed)
        for _ in range(many):
            self.reserve(**an_ask(chance))

    def some(self, which: int, *, prefilling: bool = False) -> tuple[Scheduler, str] | None:
        choices = [
            (s, name) for s in self.schedulers for name, h in s.held.items() if h.prefilling or not prefilling
        ]
        return choices[which % len(choices)] if choices else None

    @rule(
        which=st.lists(
            st.tuples(st.integers(0, 3), st.sampled_from(["ends", "decodes", "held"])), min_size=1, max_size=4
        )
    )
    def work_goes_on(self, which: list[tuple[int, str]]) -> None:
        for each, what in which:
            self.now_s += 1 / 8
            if what == "ends":
                self.request_ends(each)
            else:
                self.prefill_finishes(each, is_held=what == "held")

    @rule(
        which=st.integers(0, 99),
        prefill=st.sampled_from(PREFILLS),
        cost_s=st.integers(1, 40).map(lambda eighths: eighths / 8),
        room=st.booleans(),
    )
    def one_that_waits_for_its_turn_wants_another_instance(
        self, which: int, prefill: str, cost_s: float, room: bool
    ) -> None:
        """It gets it where nobody waits and no more is ahead of it than it bears; it keeps its age."""
        here = next(each for each in PREFILLS if each != prefill)
        for _ in range(2):
            # The second one waits at least, for the first.
            unbounded = {"queue_slack_s": inf, "batch_slack": None, "kv_slack": None}
            asked = an_ask(Random(which)) | {"prefill": here, "waits_above_s": 0.0, **unbounded}
            self.reserve(**asked)
        waiting = [
            (s, name)
            for s in self.schedulers
            for name, h in s.held.items()
            if h.prefilling and h.begun_s == inf and h.queue == here
        ]
        if not waiting or prefill in self.blurred:
            return
        self.now_s += 1 / 8
        scheduler, name = waiting[which % len(waiting)]
        held = scheduler.held[name]
        self.returns(scheduler)
        if prefill in self.blurred:
            return
        there, ahead_s = self.queue(prefill), self.queued_s(prefill)
        most_s = ahead_s if room else ahead_s - 1 / 8
        expected = not there or (all(h.begun_s < inf for h in there) and 0 < ahead_s <= max(0.0, most_s))
        arrives_s = self.now_s + 1
        wanted = replace(
            held.reservation, prefill=prefill, prefill_cost_s=cost_s, prefill_end_s=arrives_s,
            decode_end_s=arrives_s + 2, prefill_tokens=7, latest_end_s=self.now_s + 9,
        )  # fmt: skip
        before = self.changing_heads()
        assert self.run(scheduler.ledger.move(wanted, max(0.0, most_s), self.now_s)) == expected
        if expected:
            held.reservation = wanted
            held.decode_end_s = wanted.decode_end_s
            self.heads_changed(before)

    @rule(
        which=st.integers(0, 3),
        decode=st.sampled_from(DECODES),
        bound=st.sampled_from(["none", "batch", "kv", "step"]),
        room=st.booleans(),
    )
    def one_that_is_held_asks_for_a_place(self, which: int, decode: str, bound: str, room: bool) -> None:
        """Each bound just holds or is just broken; what does not decode yet takes no place."""
        waiting = [(s, name) for s in self.schedulers for name, h in s.held.items() if h.is_held]
        if not waiting:
            return
        self.now_s += 1 / 8
        scheduler, name = waiting[which % len(waiting)]
        held = scheduler.held[name]
        self.returns(scheduler)
        there = [h for h in self.known() if h.reservation.decode == decode and h.decoding]
        requests = len(there) + 1
        tokens = sum(h.reservation.kv_tokens for h in there) + held.reservation.kv_tokens
        less = 0 if room else 1
        limits = SeatLimits()
        if bound == "batch":
            limits = SeatLimits(batch=max(1, requests - less))
        elif bound == "kv":
            limits = SeatLimits(kv_tokens=tokens - less)
        elif bound == "step":
            # Eighths, so that both sides' sums are exact.
            limits = SeatLimits(
                step_s=1 + requests / 8 + tokens / 4 - less / 8, base_s=1, request_s=1 / 8, token_s=1 / 4
            )
        expected = None
        if there and not room and bound != "none":
            expected = RefusalReason.KV_MEMORY if bound == "kv" else RefusalReason.TBT
        assert self.run(scheduler.ledger.seat(name, decode, limits, self.now_s)) == expected
        if expected is None:
            self.seated(held, decode)

    def seated(self, held: Held, decode: str) -> None:
        reservation = held.reservation
        held.reservation = replace(reservation, decode=decode)
        held.is_held = False
        held.decode_end_s = self.now_s + reservation.decode_end_s - reservation.prefill_end_s

    @rule(which=st.integers(0, 3))
    def turn_comes(self, which: int) -> None:
        """A prefill that waited is handed over; said twice it counts once."""
        waits = [(s, n) for s in self.schedulers for n, h in s.held.items() if h.prefilling]
        waits = [(s, n) for s, n in waits if s.held[n].begun_s == inf]
        if not waits:
            return
        self.now_s += 1 / 8
        scheduler, name = waits[which % len(waits)]
        scheduler.ledger.prefill_begun(name, self.now_s)
        scheduler.ledger.prefill_begun(name, self.now_s + 1)
        self.settle(scheduler)
        scheduler.held[name].begun_s = self.now_s

    def prefill_finishes(self, which: int, *, is_held: bool) -> None:
        if (choice := self.some(which, prefilling=True)) is None:
            return
        scheduler, name = choice
        held = scheduler.held[name]
        scheduler.ledger.prefill_finished(name, self.now_s, held=is_held)
        self.settle(scheduler)
        before = self.changing_heads()
        held.prefilling = False
        held.is_held = is_held
        held.decode_end_s = self.now_s + held.reservation.decode_end_s - held.reservation.prefill_end_s
        self.heads_changed(before)

    def request_ends(self, which: int) -> None:
        if (choice := self.some(which)) is None:
            return
        scheduler, name = choice
        scheduler.ledger.release(name, self.now_s)
        scheduler.ledger.release(name, self.now_s)
        self.settle(scheduler)
        before = self.changing_heads()
        del scheduler.held[name]
        self.heads_changed(before)

    @rule()
    def all_look(self) -> None:
        """Everybody refreshes: then everybody knows everything."""
        for _ in range(2):
            for scheduler in self.schedulers:
                self.returns(scheduler)
                self.run(scheduler.ledger.refresh(self.now_s))
        for scheduler in self.schedulers:
            self.compare(scheduler.ledger.loads(self.now_s))

    def compare(self, loads: Any) -> None:
        for instance in PREFILLS + DECODES:
            load = loads.get(instance, InstanceLoad())
            here = [h for h in self.known() if h.reservation.decode == instance]
            assert load.batch == sum(h.decoding for h in here)
            assert load.arriving == sum(not h.decoding for h in here)
            assert load.kv_tokens == sum(h.reservation.kv_tokens for h in here)
            assert sum(n for _, n, _ in load.prefill_ends) == load.arriving
            expected: dict[int, list[int]] = {}
            for h in here:
                sums = expected.setdefault(int(h.decode_end_s / BUCKET_S), [0, 0])
                sums[0] += 1
                sums[1] += h.reservation.kv_tokens
            assert load.decode_ends == tuple((b, *expected[b]) for b in sorted(expected))
            queue = self.queue(instance)
            assert load.queued == len(queue)
            assert list(load.waiting) == [
                (h.reserved_s, round(h.reservation.prefill_cost_s * 1e6), h.reservation.latest_end_s)
                for h in queue
                if h.begun_s == inf
            ]
            if not load.waiting:
                assert load.handed_over_s == load.queued_s
            elif len(load.waiting) == load.queued:
                assert load.handed_over_s == 0
            assert load.queued_tokens == sum(h.reservation.prefill_tokens for h in queue)
            if instance not in self.blurred:
                assert load.queued_s == pytest.approx(self.queued_s(instance))
            else:
                total_s = sum(h.reservation.prefill_cost_s for h in queue)
                under_way = self.under_way(instance)
                head_s = under_way[0].reservation.prefill_cost_s if under_way else 0.0
                assert total_s - head_s - 1e-5 <= load.queued_s <= total_s + 1e-5

    def teardown(self) -> None:
        if not self.schedulers:
            return
        for scheduler in self.schedulers:
            for name in list(scheduler.held):
                scheduler.ledger.release(name, self.now_s)
            scheduler.held.clear()
            self.settle(scheduler)
        self.all_look()
        for scheduler in self.schedulers:
            assert scheduler.ledger.loads(self.now_s) == {}
        self.end()
        self.loop.close()

    def end(self) -> None:
        pass


class RedisLedgerMachine(LedgerMachine):
    """Three schedulers on one Redis; they crash and stall and leave, and Redis loses its memory."""

    server: RedisServer

    def begin(self) -> list[Scheduler]:
        self.redis = self.server.client()
        self.redis.flushall()
        return [self.scheduler() for _ in range(3)]

    def scheduler(self) -> Scheduler:
        client = RespClient(self.server.url)
        self.run(client.connect())
        # A dead one is buried by the test, not by the clock: steps may take any time.
        ledger = RedisLedger(client, prefix=PREFIX, heartbeat_ttl_s=600, reserve_budget_s=10)
        self.run(ledger.refresh(self.now_s))
        return Scheduler(ledger, client)

    def bury(self, dead: Scheduler) -> None:
        """The heartbeat of one scheduler expires and a peer notices."""
        assert isinstance(dead.ledger, RedisLedger)
        peer = next(s for s in self.schedulers if s is not dead)
        self.returns(peer)
        self.run(peer.ledger.refresh(self.now_s))
        self.redis.delete(f"{PREFIX}ledger:alive:{dead.ledger.incarnation}")
        before = self.changing_heads()
        dead.present = False
        self.run(peer.ledger.refresh(self.now_s))
        self.heads_changed(before)

    def crash(self, who: int) -> None:
        dead = self.schedulers[who]
        assert dead.client is not None
        self.run(dead.client.close())
        self.bury(dead)
        self.schedulers[who] = self.scheduler()

    def stall_until_taken_for_dead(self, who: int) -> None:
        self.bury(self.schedulers[who])

    def leave_politely(self, who: int) -> None:
        leaving = self.schedulers[who]
        assert leaving.client is not None
        self.run(leaving.ledger.refresh(self.now_s))
        self.returns(leaving)
        before = self.changing_heads()
        self.run(leaving.ledger.close())
        self.run(leaving.client.close())
        leaving.held.clear()
        self.heads_changed(before)
        self.schedulers[who] = self.scheduler()

    def redis_loses_its_memory(self, who: int) -> None:
        self.redis.flushall()
        self.redis.script_flush()
        self.since.clear()
        self.blurred.clear()
        for scheduler in self.schedulers:
            scheduler.present = False

    def reserve_while_redis_is_away(self, who: int) -> None:
        scheduler = self.schedulers[who]
        assert isinstance(scheduler.ledger, RedisLedger)
        self.now_s += 1 / 8
        wanted = Reservation(f"r{next(self.ids)}", "p0", 1.0, "d0", 7, self.now_s + 1, self.now_s + 2)
        assert scheduler.ledger.reserve_locally(wanted, Limits(), self.now_s) is None
        self.returns(scheduler)
        before = self.changing_heads()
        scheduler.held[wanted.id] = Held(wanted, self.now_s, self.now_s, decode_end_s=wanted.decode_end_s)
        self.run(scheduler.ledger.refresh(self.now_s))
        self.heads_changed(before)

    @rule(
        who=st.integers(0, 2),
        trouble=st.sampled_from(
            [
                "crash",
                "leave_politely",
                "stall_until_taken_for_dead",
                "redis_loses_its_memory",
                "reserve_while_redis_is_away",
            ]
        ),
    )
    def trouble_comes(self, who: int, trouble: str) -> None:
        getattr(self, trouble)(who)

    @rule()
    def what_redis_holds_is_positive_and_adds_up(self) -> None:
        for scheduler in self.schedulers:
            self.settle(scheduler)
        sums: dict[bytes, int] = {}
        for key in self.redis.scan_iter(f"{PREFIX}ledger:row:*"):
            for name, value in self.redis.hgetall(key).items():
                if name != b"gen":
                    assert int(value) > 0
                    sums[name] = sums.get(name, 0) + int(value)
        for instance in DECODES:
            here = [h.reservation for h in self.known() if h.reservation.decode == instance]
            assert sums.get(f"n:{instance}".encode(), 0) == len(here)
            assert sums.get(f"k:{instance}".encode(), 0) == sum(r.kv_tokens for r in here)
            decoding = [h.reservation for h in self.known() if h.decoding and h.reservation in here]
            assert sums.get(f"s:{instance}".encode(), 0) == len(decoding)
            assert sums.get(f"t:{instance}".encode(), 0) == sum(r.kv_tokens for r in decoding)
        for instance in PREFILLS + DECODES:
            cost_s = sum(h.reservation.prefill_cost_s for h in self.queue(instance))
            assert sums.get(f"q:{instance}".encode(), 0) == round(cost_s * 1e6)

    def end(self) -> None:
        self.what_redis_holds_is_positive_and_adds_up()
        keys = [key.decode().removeprefix(f"{PREFIX}ledger:") for key in self.redis.scan_iter()]
        left = {key.partition(":")[0] for key in keys}
        assert left <= {"incs", "alive", "row", "snap"}
        for scheduler in self.schedulers:
            assert scheduler.client is not None
            self.run(scheduler.ledger.close())
            self.run(scheduler.client.close())
        assert self.redis.dbsize() == 0
        self.redis.close()


def test_the_ledger_of_one_scheduler_is_right_whatever_it_does() -> None:
    run_state_machine_as_test(
        LedgerMachine, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


def test_schedulers_that_share_a_redis_agree_whatever_happens_to_them(redis_server: RedisServer) -> None:
    class Machine(RedisLedgerMachine):
        server = redis_server

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
