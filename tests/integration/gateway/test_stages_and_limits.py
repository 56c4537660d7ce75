"""Stages that check for themselves, the limit of each phase, and KV that nobody wants any more."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from mooncake_core.ledger import Limits, MemoryLedger, RefusalReason, Reservation
from mooncake_core.registry import Role
from mooncake_scheduler.gateway.tokens import ModelFolder, mismatch, parity
from mooncake_testing.gateway import Gateway, gateway, write_instances
from mooncake_testing.raw_client import RawClient
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.scripted_pools import pair
from mooncake_testing.toy_model import write_toy_model
from mooncake_testing.waiting import until

PROFILE = "llama3-70b-8xa800"


# -- mode none


async def test_in_mode_none_prefill_refuses_at_its_start_what_would_come_too_late(tmp_path: Path) -> None:
    hold = asyncio.Event()
    settings = {"profile": PROFILE, "slo": {"ttft_s": 1.0}}
    async with pair(tmp_path, **settings) as (running, prefill, _):
        prefill.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete(prompt=list(range(1, 8000))))
        await prefill.leg()
        refused = await running.complete(prompt=list(range(10_000, 18_000)))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "ttft"
        assert int(refused.headers["retry-after"]) >= 1
        assert len(prefill.legs) == 1
        hold.set()
        assert (await first).status_code == 200
        metrics = running.scheduler.services.metrics
        assert metrics.wasted_prefills == 0
        assert metrics.admissions["refused", "ttft"] == 1
        await running.settled()


@pytest.mark.parametrize("connector", ["MooncakeConnector", "NixlConnector"])
async def test_in_mode_none_decode_refuses_after_the_prefill_and_its_kv_is_freed(
    tmp_path: Path, connector: str
) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path, connector, decode={"max_batch": 1}) as (running, prefill, decode):
        decode.usual = Act(hold=hold)
        first = asyncio.ensure_future(running.complete())
        await decode.leg()
        refused = await running.complete(stream=True, stream_options={"include_usage": True}, max_tokens=99)
        # The client hears so at once, not when the KV has been freed.
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "tbt"
        staged = prefill.legs[1]
        freeing = (await decode.leg(2)).body
        assert freeing["max_tokens"] == 1
        assert freeing["stream"] is False
        assert "stream_options" not in freeing
        assert freeing["kv_transfer_params"]["do_remote_prefill"] is True
        if connector == "MooncakeConnector":
            assert freeing["kv_transfer_params"]["transfer_id"] == staged.kv["transfer_id"]
        assert running.reserved == 1
        hold.set()
        assert (await first).status_code == 200
        await running.settled()
        metrics = running.scheduler.services.metrics
        assert metrics.wasted_prefills == 1
        assert metrics.admissions["refused", "tbt"] == 1
        latest = running.scheduler.services.decisions.get(refused.headers["x-request-id"])
        assert latest is not None
        assert (latest.outcome, latest.refused) == ("refused", RefusalReason.TBT)
        assert "mooncake_wasted_prefills_total 1.0" in (await running.client.get("/metrics")).text


async def test_in_mode_none_a_decode_with_room_takes_what_was_prefilled(tmp_path: Path) -> None:
    async with pair(
        tmp_path, decode={"max_batch": 1, "kv_capacity_tokens": 10}, profile=PROFILE, slo={"tbt_s": 1e-6}
    ) as (running, _, decode):
        # It is idle: whatever the targets say, waiting would not make it better.
        assert (await running.complete()).status_code == 200
        assert len(decode.legs) == 1
        await running.settled()


# -- each phase has its own limit


async def said_soon(running: Gateway, **fields: Any) -> httpx.Response:
    began_s = time.monotonic()
    answer = await running.complete(**fields)
    # The limits that a request has unless told otherwise are 10 s and more.
    assert time.monotonic() - began_s < 9
    return answer


async def test_a_tokenizer_that_is_stuck_ends_in_a_504_soon(tmp_path: Path) -> None:
    engine = ScriptedEngine("e")
    engine.silent.add("/tokenize")
    async with engines(engine), gateway(tmp_path, [engine.instance()], tokenise_timeout_s=0.2) as running:
        answer = await said_soon(running, prompt="some text")
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert engine.legs == []
        await running.settled()


class SlowLedger(MemoryLedger):
    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        await asyncio.sleep(0.5)
        return await super().reserve(reservation, limits, now_s)


async def test_placing_that_takes_too_long_ends_in_a_504_and_nothing_stays_reserved(tmp_path: Path) -> None:
    async with pair(tmp_path, place_timeout_s=0.1) as (running, prefill, _):
        services = running.scheduler.services
        services.ledger = services.placer.worlds.ledger = SlowLedger()
        answer = await said_soon(running)
        assert answer.status_code == 504
        assert prefill.legs == []
        await running.settled()


async def test_a_reservation_that_leads_to_no_leg_ends_in_a_504(tmp_path: Path) -> None:
    async with pair(tmp_path, dispatch_timeout_s=0.2) as (running, prefill, _):
        prefill.silent.add("/query")
        running.scheduler.services.engine_ids.forget("p")
        answer = await said_soon(running)
        assert answer.status_code == 504
        assert prefill.legs == []
        await running.settled()


# -- what happens between the legs


async def test_leaving_while_the_engine_id_is_asked_again_after_the_prefill_still_frees_its_kv(
    tmp_path: Path,
) -> None:
    hold, gate = asyncio.Event(), asyncio.Event()
    async with pair(tmp_path) as (running, prefill, decode):
        assert (await running.complete()).status_code == 200
        ids = running.scheduler.services.engine_ids
        ask = ids._ask

        async def slow(*asked: Any) -> Any:
            await gate.wait()
            return await ask(*asked)

        prefill.usual = Act(hold=hold)
        client = await RawClient.ask(running.port)
        leg = await prefill.leg(2)
        ids._ask = slow  # type: ignore[method-assign]
        ids.forget("p")
        hold.set()
        await leg.finished.wait()
        await asyncio.sleep(0.1)
        client.leave()
        await asyncio.sleep(0.1)
        gate.set()
        freeing = (await decode.leg(2)).body
        assert freeing["max_tokens"] == 1
        assert freeing["kv_transfer_params"]["transfer_id"] == leg.kv["transfer_id"]
        await running.settled()
        assert running.scheduler.services.metrics.cancellations == {"prefilling": 1}


class LeavingLedger(MemoryLedger):
    """While the second place is taken, its instance leaves."""

    def __init__(self, running: Gateway) -> None:
        super().__init__()
        self.members = running.scheduler.services.roster.members
        self.left = ""
        self.taken = 0

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        self.taken += 1
        if self.taken == 2:
            self.left = reservation.decode
            self.members.pop(self.left)
        return await super().reserve(reservation, limits, now_s)


async def test_a_decode_that_leaves_while_the_kv_is_handed_over_again_is_replaced(tmp_path: Path) -> None:
    prefill = ScriptedEngine("p", Role.PREFILL, "MooncakeConnector")
    decodes = [ScriptedEngine(f"d{n}", Role.DECODE, "MooncakeConnector") for n in range(3)]
    async with (
        engines(prefill, *decodes),
        gateway(tmp_path, [each.instance() for each in (prefill, *decodes)]) as running,
    ):
        for each in decodes:
            each.script = [Act(status=503)]
        services = running.scheduler.services
        ledger = services.ledger = services.placer.worlds.ledger = LeavingLedger(running)
        services.roster.version += 1
        answer = await running.complete()
        assert ledger.left
        # Whoever is asked next refuses once more; a third try is served, or the back-pressure passed on.
        assert answer.status_code in (200, 503)
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "engine_busy"
        await running.settled()


# -- a place that others took


class TakenLedger(MemoryLedger):
    """Others take the place each time, at last with seven seconds of prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        self.asked += 1
        if self.asked == 2:
            others = Reservation("others", "p", 7.0, "d", 100, now_s + 7, now_s + 8)
            await super().reserve(others, Limits(), now_s)
        return RefusalReason.TTFT


async def test_a_place_that_was_lost_says_when_the_queue_will_have_drained(tmp_path: Path) -> None:
    settings = {"profile": PROFILE, "slo": {"ttft_s": 1.0}, "admission": {"mode": "predictive"}}
    async with pair(tmp_path, **settings) as (running, prefill, _):
        services = running.scheduler.services
        services.ledger = services.placer.worlds.ledger = TakenLedger()
        refused = await running.complete()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "ttft"
        assert 5 <= int(refused.headers["retry-after"]) <= 7
        assert prefill.legs == []


async def test_what_is_open_to_the_server_of_an_instance_that_left_is_closed(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        assert (await running.complete()).status_code == 200
        ids = running.scheduler.services.engine_ids
        assert list(ids._servers) == [prefill.url]
        write_instances(tmp_path / "instances.json", [decode.instance()])
        await until(lambda: not ids._servers)
        assert ids._known == {}


# -- keys, metrics, explanations


async def test_weights_that_were_rotated_change_who_has_more_than_its_share(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"a": {"key": "k-a", "weight": 1}, "b": {"key": "k-b", "weight": 1}}))
    engine = ScriptedEngine("e")
    async with (
        engines(engine),
        gateway(tmp_path, [engine.instance()], auth={"api_keys_file": str(keys)}) as running,
    ):
        scheduler = running.scheduler
        share = scheduler.services.placer.conductor.fair_share
        now_s = scheduler.services.clock.now_s()
        share.charge("a", 3_000, now_s)
        share.charge("b", 1_000, now_s)
        assert share.excess("a", now_s) == pytest.approx(0.5)
        fresh = tmp_path / "fresh.json"
        fresh.write_text(json.dumps({"a": {"key": "k-a", "weight": 3}, "b": {"key": "k-b", "weight": 1}}))
        os.replace(fresh, keys)
        await until(lambda: share.excess("a", now_s) == pytest.approx(0))


async def test_what_a_stream_was_predicted_and_what_it_took_are_told_with_their_difference(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, profile=PROFILE) as (running, _, decode):
        decode.usual = Act(gap_s=0.01)
        answer = await running.complete(stream=True, max_tokens=12)
        request_id = answer.headers["x-request-id"]
        await running.settled()
        url = f"http://127.0.0.1:{running.scheduler.admin_port}/decisions/{request_id}"
        async with httpx.AsyncClient(trust_env=False) as client:
            told = (await client.get(url)).json()
        for name in ("ttft_s", "tbt_s"):
            difference = told[name] - told["placement"][name]
            assert told["prediction_error"][name] == pytest.approx(difference)
        assert told["transfer_s"] > 0
        text = (await running.client.get("/metrics")).text
        for quantity in ("ttft", "tbt"):
            assert f'mooncake_prediction_error_seconds_bucket{{le="+Inf",quantity="{quantity}"}} 1.0' in text
        for stage in ("tokenise", "match", "decide", "reserve"):
            assert f'mooncake_router_overhead_seconds_count{{stage="{stage}"}} 1.0' in text
        for name in (
            "mooncake_transfer_seconds_count 1.0", "mooncake_index_match_seconds_count 1.0",
            "mooncake_index_probes_total", "mooncake_index_holes_total", "mooncake_index_bytes",
            "mooncake_index_failures_total 0.0", "mooncake_token_estimates_total 0.0",
            "mooncake_conversation_hits_total", "mooncake_conversation_misses_total",
        ):  # fmt: skip
            assert name in text


async def test_an_engine_is_not_taken_for_one_without_tokenizer_because_of_an_errors_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> Any:
        raise ConnectionError("a proxy in between: status 404")

    monkeypatch.setattr(parity, "tokenize", broken)
    with pytest.raises(ConnectionError):
        await mismatch(ModelFolder(write_toy_model(tmp_path / "model")), None, "tiny")  # type: ignore[arg-type]


async def test_a_stream_teaches_the_pace_of_the_batch_that_it_was_part_of(tmp_path: Path) -> None:
    learned: list[tuple[float, float]] = []
    async with pair(tmp_path) as (running, _, decode):
        conductor = running.scheduler.services.placer.conductor
        conductor.observe_step = lambda _, batch, kv, __: learned.append((batch, kv))  # type: ignore[method-assign]
        for together in (1, 2, 4):
            learned.clear()
            hold = asyncio.Event()
            decode.usual = Act(hold=hold, gap_s=0.02)
            before = len(decode.legs)
            asked = [
                asyncio.ensure_future(running.complete(stream=True, max_tokens=20)) for _ in range(together)
            ]
            await until(lambda wanted=before + together: len(decode.legs) == wanted)  # type: ignore[misc]
            hold.set()
            await asyncio.gather(*asked)
            await running.settled()
            assert len(learned) == together
            # The last to end may have been alone at its end, but never without itself.
            assert max(batch for batch, _ in learned) == together
            assert min(batch for batch, _ in learned) >= (together + 1) / 2
        assert min(kv for _, kv in learned) >= 40 + 20 / 2


async def test_a_deadline_while_the_engine_id_is_asked_again_still_frees_the_kv(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with pair(tmp_path, request_timeout_s=0.5) as (running, prefill, decode):
        ids = running.scheduler.services.engine_ids
        ask = ids._ask
        await until(lambda: ids._known)

        async def slow(*asked: Any) -> Any:
            await gate.wait()
            return await ask(*asked)

        hold = asyncio.Event()
        prefill.usual = Act(hold=hold)
        asking = asyncio.ensure_future(running.complete())
        leg = await prefill.leg()
        ids._ask = slow  # type: ignore[method-assign]
        ids.forget("p")
        hold.set()
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        gate.set()
        freeing = await decode.leg()
        assert freeing.body["max_tokens"] == 1
        assert freeing.kv["transfer_id"] == leg.kv["transfer_id"]
        assert freeing.kv["remote_engine_id"] == prefill.engine_id
        await running.settled()


async def test_an_answer_of_before_a_failure_is_not_taken_for_the_engine_id_after_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, _):
        services = running.scheduler.services
        ids, instance = services.engine_ids, services.roster.members["p"].instance
        ids.forget("p")
        prefill.engine_id = "before"
        before = ids.asking(instance, 1)
        ids.forget("p")
        after = ids.asking(instance, 1)
        assert ids.asking(msgspec.structs.replace(instance, epoch=instance.epoch + 1), 1) is not after
        await before
        prefill.engine_id = "after"
        assert ids.known(instance, 1) is None
        await after
