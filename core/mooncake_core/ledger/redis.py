"""The ledger that schedulers share through Redis; the scheme of its keys stands in `scripts`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from math import inf
from uuid import uuid4

from msgspec.structs import replace

from mooncake_core.ledger.board import Board
from mooncake_core.ledger.contract import InstanceLoad, Limits, RefusalReason, Reservation, SeatLimits
from mooncake_core.ledger.row import Row
from mooncake_core.ledger.scripts import (
    BATCH_FULL,
    BEGIN,
    END,
    KV_FULL,
    MOVE,
    QUEUE_FULL,
    RESERVE,
    SEAT,
    STALE,
    TAKEN,
    TAKEN_AND_WAITS,
)
from mooncake_core.ledger.share import Waiting
from mooncake_core.ledger.tally import Entry, microseconds
from mooncake_core.resp import RespClient

HEARTBEAT_TTL_S = 3.0
"""Wall seconds after which a silent incarnation is dead to its peers."""
PEERS_KEPT_S = 10.0
"""Wall seconds for which the last known load of peers counts while Redis is away: later it says nothing."""
RESERVE_BUDGET_S = 0.05
"""Wall seconds that a request waits for each answer of Redis."""

_REASONS = {
    QUEUE_FULL: RefusalReason.TTFT,
    BATCH_FULL: RefusalReason.TBT,
    KV_FULL: RefusalReason.KV_MEMORY,
}


class RedisLedger:
    """One incarnation's hand on the shared ledger. Satisfies `Ledger`.

    The own table is the truth about what this process has promised. Redis holds a copy of it, which is posted
    again as a whole whenever it may differ: after a stall in which peers took this process for dead, after a
    broken connection, and when Redis comes back without its memory.

    Args:
        client: The connection, kept by the caller, who also closes it. Calls of others may run over it.
        prefix: Begins every key. Write it with a hash tag (`{name}:`) so that all keys share one slot.
        incarnation: Unique name of this life of this process; None = made up.
        heartbeat_ttl_s: Wall seconds after which peers take a silent incarnation for dead.
        reserve_budget_s: Wall seconds that `reserve`, `move` and `seat` wait for an answer, or for the table
            to be posted, before they raise ConnectionError.
    """

    def __init__(
        self,
        client: RespClient,
        *,
        prefix: str,
        incarnation: str | None = None,
        heartbeat_ttl_s: float = HEARTBEAT_TTL_S,
        reserve_budget_s: float = RESERVE_BUDGET_S,
    ) -> None:
        self.incarnation = incarnation or f"{os.uname().nodename}-{os.getpid()}-{uuid4().hex[:8]}"
        if "|" in self.incarnation:
            raise ValueError(f"incarnation {self.incarnation!r}: the sign | is taken, choose another name")
        self._client = client
        self._budget_s = reserve_budget_s
        self._board = Board()
        self._row = Row(
            client, f"{prefix}ledger:".encode(), self.incarnation, int(heartbeat_ttl_s * 1000), self._board
        )
        self._now_s = 0.0
        self._before_us = client.on_connected
        client.on_connected = self._on_connected

    @property
    def posted(self) -> int:
        """How often the whole table was posted: 1 in a quiet life."""
        return self._row.posted

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """As the contract says.

        Raises:
            ConnectionError: Redis is away or too slow; `reserve_locally` can be asked instead.
            ValueError: the id is held already.
        """
        if reservation.id in self._board.book:
            raise ValueError(f"reservation {reservation.id} is held already: release it before")
        row = self._row
        if not row.settled:
            await row.settle(self._budget_s)
        reply, generation = await self._try_reserve(reservation, limits, now_s)
        if reply == STALE:
            row.doubt_if_of(generation)
            await row.settle(self._budget_s)
            reply, generation = await self._try_reserve(reservation, limits, now_s)
        if reply not in (TAKEN, TAKEN_AND_WAITS):
            if reply in _REASONS:
                return _REASONS[reply]
            row.doubt()
            raise ConnectionError("the ledger's table is being replaced faster than it can be used")
        if reservation.id in self._board.book:
            row.doubt()
            raise ValueError(f"reservation {reservation.id} was asked for twice at once")
        self._board.book.add(reservation, now_s, waits=reply == TAKEN_AND_WAITS)
        if generation != row.generation:
            # Taken, and then wiped by a posting of the table that did not know of it yet.
            row.doubt()
        return None

    def reserve_locally(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """Reserve by this process's mirror alone, for when `reserve` raises ConnectionError.

        Others learn of it when Redis is back; that the bounds hold over all of them is not promised.

        Raises:
            ValueError: the id is held already.
        """
        refused = self._board.exceeded(reservation, limits, now_s)
        if refused is None:
            waits = self._board.has_to_wait(reservation, now_s)
            entry = self._board.book.add(reservation, now_s, waits=waits)
            # Redis is told whatever its bounds say; whether it waits was decided here.
            told = replace(reservation, waits_above_s=inf)
            self._row.send(RESERVE, *_reserve_arguments(told, Limits(), now_s))
            if waits:
                self._row.send(BEGIN, reservation.id, "+inf", entry.queue, entry.cost_us)
        return refused

    def waiting(self, reservation_id: str) -> Waiting | None:
        return self._board.book.waiting(reservation_id)

    async def move(self, reservation: Reservation, ahead_s: float, now_s: float) -> bool:
        """As the contract says.

        Raises:
            ConnectionError: Redis is away or too slow, or does not hold the own table just now (`refresh`
                posts it: a move is not worth waiting for that); it waits on where it did.
            LookupError: no such reservation waits for its turn.
        """
        entry, row = self._board.in_line(reservation.id), self._row
        if not row.settled:
            raise ConnectionError("Redis does not hold the ledger's table as it is")
        generation = row.generation
        reply = await row.ask(
            MOVE,
            reservation.id,
            repr(now_s),
            entry.queue,
            entry.cost_us,
            reservation.prefill or reservation.decode,
            max(1, microseconds(reservation.prefill_cost_s)),
            microseconds(ahead_s),
            within_s=self._budget_s,
        )
        if reply == QUEUE_FULL:
            return False
        if reply == STALE:
            row.doubt_if_of(generation)
            raise ConnectionError("the ledger's table is to be posted anew")
        taken = reply == TAKEN and self._board.book.move(reservation) is not None
        if not taken or generation != row.generation:
            # Redis is not as the own table is: replaced meanwhile, or the request ended while it was asked.
            row.doubt()
        if reply != TAKEN:
            raise ConnectionError("the ledger's table is being replaced faster than it can be used")
        return True

    def prefill_begun(self, reservation_id: str, now_s: float) -> None:
        entry = self._board.begin_prefill(reservation_id, now_s)
        if entry is None:
            return
        self._row.send(BEGIN, entry.reservation.id, repr(now_s), entry.queue, entry.cost_us)

    def prefill_finished(self, reservation_id: str, now_s: float, *, held: bool = False) -> None:
        entry = self._board.finish_prefill(reservation_id, now_s, held=held)
        if entry is not None:
            self._tell(entry, now_s, leaves_prefill=True, starts=not held)

    async def seat(
        self, reservation_id: str, decode: str, limits: SeatLimits, now_s: float
    ) -> RefusalReason | None:
        """As the contract says.

        Raises:
            ConnectionError: Redis is away or too slow; `seat_locally` can be asked instead.
            LookupError: no such reservation waits.
        """
        entry, row = self._board.held(reservation_id), self._row
        for _ in range(2):
            await row.settle(self._budget_s)
            generation = row.generation
            reply = await row.ask(SEAT, *_seat_arguments(entry, decode, limits), within_s=self._budget_s)
            if reply != STALE:
                break
            row.doubt_if_of(generation)
        if reply in _REASONS:
            return _REASONS[reply]
        taken = reply == TAKEN and self._board.book.seat(reservation_id, decode, now_s) is not None
        if not taken or generation != row.generation:
            # Redis is not as the own table is: replaced meanwhile, or the request ended while it was asked.
            row.doubt()
        if reply != TAKEN:
            raise ConnectionError("the ledger's table is being replaced faster than it can be used")
        return None

    def seat_locally(
        self, reservation_id: str, decode: str, limits: SeatLimits, now_s: float
    ) -> RefusalReason | None:
        """Seat by this process's mirror alone, for when `seat` raises ConnectionError.

        Raises:
            LookupError: no such reservation waits.
        """
        entry = self._board.held(reservation_id)
        refused = self._board.seat_exceeded(entry.reservation.kv_tokens, decode, limits)
        if refused is None:
            # Redis is told whatever its bounds say, and from where: the entry knows its new place afterwards.
            told = _seat_arguments(entry, decode, SeatLimits())
            self._board.book.seat(reservation_id, decode, now_s)
            self._row.send(SEAT, *told)
        return refused

    def release(self, reservation_id: str, now_s: float) -> None:
        entry = self._board.drop(reservation_id, now_s)
        if entry is not None:
            self._tell(entry, now_s, leaves_prefill=entry.prefilling, ends=True)

    def loads(self, now_s: float) -> Mapping[str, InstanceLoad]:
        return self._board.loads(now_s)

    def load(self, instance: str, now_s: float) -> InstanceLoad:
        return self._board.load(instance, now_s)

    async def refresh(self, now_s: float) -> None:
        if self._row.closed:
            return
        self._now_s = now_s
        try:
            await self._row.refresh(now_s)
        except ConnectionError:
            if time.monotonic() - self._row.heard_s > PEERS_KEPT_S:
                self._row.forget_peers()
            raise

    async def close(self) -> None:
        """Give back every reservation of this incarnation and leave; where Redis is away, peers reap it."""
        self._board = Board()
        self._client.on_connected = self._before_us
        await self._row.leave(self._now_s)

    def _on_connected(self) -> None:
        # What was under way on the connection before may be lost, and this may be another Redis.
        self._row.doubt()
        if self._before_us is not None:
            self._before_us()

    async def _try_reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> tuple[int, int]:
        """Ask Redis; returns its reply and the generation under which it was asked."""
        generation = self._row.generation
        arguments = _reserve_arguments(reservation, limits, now_s)
        return await self._row.ask(RESERVE, *arguments, within_s=self._budget_s), generation

    def _tell(
        self, entry: Entry, now_s: float, *, leaves_prefill: bool, starts: bool = False, ends: bool = False
    ) -> None:
        reservation = entry.reservation
        self._row.send(
            END,
            reservation.id,
            repr(now_s),
            entry.queue if leaves_prefill else b"",
            entry.cost_us if leaves_prefill else b"",
            reservation.decode,
            reservation.kv_tokens,
            int(starts),
            (b"decode" if entry.decoding else b"promise") if ends else b"",
        )


def _reserve_arguments(reservation: Reservation, limits: Limits, now_s: float) -> tuple[str | int, ...]:
    return (
        reservation.id,
        reservation.prefill or reservation.decode,
        max(1, microseconds(reservation.prefill_cost_s)),
        reservation.decode,
        reservation.kv_tokens,
        repr(now_s),
        -1 if limits.queued_s == inf else microseconds(limits.queued_s),
        limits.batch,
        limits.kv_tokens,
        -1 if reservation.waits_above_s == inf else microseconds(reservation.waits_above_s),
    )


def _seat_arguments(entry: Entry, decode: str, limits: SeatLimits) -> tuple[str | int, ...]:
    return (
        entry.reservation.decode,
        decode,
        entry.reservation.kv_tokens,
        limits.batch,
        limits.kv_tokens,
        -1 if limits.step_s == inf else repr(limits.step_s),
        repr(limits.base_s),
        repr(limits.request_s),
        repr(limits.token_s),
    )
