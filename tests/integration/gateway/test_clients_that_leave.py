from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mooncake_core.ledger import Limits, MemoryLedger, RefusalReason, Reservation
from mooncake_testing.raw_client import RawClient
from mooncake_testing.scripted_engine import Act
from mooncake_testing.scripted_pools import pair
from mooncake_testing.waiting import until


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_during_prefill_aborts_it_and_decode_hears_nothing(
    tmp_path: Path, stream: bool
) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        prefill.usual = Act(stall=True)
        client = await RawClient.ask(running.port, stream=stream)
        leg = await prefill.leg()
        client.leave()
        await asyncio.wait_for(leg.aborted.wait(), 5)
        await running.settled()
        assert decode.legs == []
        assert running.scheduler.services.metrics.cancellations == {"prefilling": 1}


async def test_leaving_after_the_hand_over_lets_decode_take_the_kv_before_it_is_aborted(
    tmp_path: Path,
) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path) as (running, _, decode):
        decode.usual = Act(hold=hold, tokens=1000, gap_s=0.01)
        client = await RawClient.ask(running.port, stream=True)
        leg = await decode.leg()
        client.leave()
        await asyncio.sleep(0.1)
        assert not leg.aborted.is_set()
        assert running.reserved == 1
        hold.set()
        await asyncio.wait_for(leg.aborted.wait(), 5)
        await running.settled()
        assert running.scheduler.services.metrics.cancellations == {"handed_over": 1}


async def test_leaving_a_whole_answer_after_the_hand_over_gives_decode_a_grace_to_take_the_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_scheduler.gateway.attempt.RELEASE_GRACE_S", 0.3)
    async with pair(tmp_path) as (running, _, decode):
        decode.usual = Act(stall=True)
        client = await RawClient.ask(running.port)
        leg = await decode.leg()
        client.leave()
        await asyncio.sleep(0.1)
        assert not leg.aborted.is_set()
        await asyncio.wait_for(leg.aborted.wait(), 5)
        await running.settled()


async def test_leaving_after_the_hand_over_of_a_decode_that_never_begins_is_bounded(tmp_path: Path) -> None:
    async with pair(tmp_path, first_token_timeout_s=0.2) as (running, _, decode):
        decode.usual = Act(stall=True)
        client = await RawClient.ask(running.port, stream=True)
        leg = await decode.leg()
        client.leave()
        await asyncio.wait_for(leg.aborted.wait(), 5)
        await running.settled()


async def test_leaving_a_stream_aborts_decode_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, _, decode):
        decode.usual = Act(tokens=1000, gap_s=0.01)
        client = await RawClient.ask(running.port, stream=True)
        await client.reader.readuntil(b"data: ")
        client.leave()
        await asyncio.wait_for(decode.legs[0].aborted.wait(), 5)
        await running.settled()
        assert running.scheduler.services.metrics.cancellations == {"decoding": 1}


async def test_leaving_while_the_bootstrap_server_is_asked_releases_everything(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        prefill.silent.add("/query")
        running.scheduler.services.engine_ids.forget("p")
        client = await RawClient.ask(running.port)
        await until(lambda: running.reserved == 1)
        client.leave()
        await running.settled()
        assert decode.legs == []


class SlowLedger(MemoryLedger):
    """A ledger that takes its time, as one behind a network does."""

    reserving = 0

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        self.reserving += 1
        await asyncio.sleep(0.2)
        return await super().reserve(reservation, limits, now_s)


async def test_leaving_while_the_reservation_is_taken_releases_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        ledger = SlowLedger()
        services = running.scheduler.services
        services.ledger = services.placer.worlds.ledger = ledger
        client = await RawClient.ask(running.port)
        await until(lambda: ledger.reserving == 1)
        client.leave()
        await asyncio.sleep(0.3)
        await running.settled()
        assert decode.legs == []
        await until(lambda: all(leg.aborted.is_set() for leg in prefill.legs))


async def test_leaving_before_the_request_is_complete_costs_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, _):
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        await asyncio.sleep(0.1)
        assert running.scheduler.server.connections == set()
        assert prefill.legs == []


async def test_a_client_that_stops_reading_holds_its_engine_back_and_is_then_cut_off(tmp_path: Path) -> None:
    async with pair(tmp_path, stall_timeout_s=0.5) as (running, _, decode):
        decode.usual = Act(tokens=1000, pad=1 << 16)
        client = await RawClient.ask(running.port, stream=True, max_tokens=1000)
        leg = await decode.leg()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(leg.aborted.wait(), 10)
        await running.settled()
        assert running.scheduler.services.metrics.cancellations == {"decoding": 1}
        assert running.scheduler.services.metrics.setbacks == {}
        client.leave()


async def test_the_end_of_the_scheduler_leaves_no_kv_staged_for_clients_that_are_gone(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with pair(tmp_path) as (running, _, decode):
        decode.usual = Act(hold=hold, tokens=1000, gap_s=0.01)
        client = await RawClient.ask(running.port, stream=True)
        leg = await decode.leg()
        stopping = asyncio.ensure_future(running.scheduler.stop(streams_s=0.05))
        # Longer than the end takes otherwise.
        await asyncio.sleep(1.0)
        assert not leg.aborted.is_set(), "aborted now, it would leave the KV staged"
        hold.set()
        await asyncio.wait_for(leg.aborted.wait(), 5)
        await stopping
        client.leave()
        assert not running.scheduler.datapath.flows
