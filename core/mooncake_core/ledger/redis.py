"""The ledger that schedulers share through Redis; the scheme of its keys stands in `scripts`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from math import inf
from uuid import uuid4

import msgspec

from mooncake_core.ledger.board import Board
from mooncake_core.ledger.book import Entry, microseconds
from mooncake_core.ledger.contract import InstanceLoad, Limits, RefusalReason, Reservation, SeatLimits
from mooncake_core.ledger.scripts import (
    BATCH_FULL,
    BEAT,
    BEGIN,
    END,
    KV_FULL,
    LEAVE,
    MOVE,
    POST,
    QUEUE_FULL,
    RESERVE,
    SEAT,
    STALE,
    TAKEN,
    TAKEN_AND_WAITS,
)
from mooncake_core.ledger.share import Share, Waiting
from mooncake_core.resp import Reply, ReplyError, RespClient, Script

HEARTBEAT_TTL_S = 3.0
"""Wall seconds after which a silent incarnation is dead to its peers."""
PEERS_KEPT_S = 10.0
"""Wall seconds for which the last known load of peers counts while Redis is away: later it says nothing."""
RESERVE_BUDGET_S = 0.05
"""Wall seconds that `reserve` waits for Redis."""

_REASONS = {
    QUEUE_FULL: RefusalReason.TTFT,
    BATCH_FULL: RefusalReason.TBT,
    KV_FULL: RefusalReason.KV_MEMORY,
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Share]).decode


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
        reserve_budget_s: Wall seconds that `reserve` waits before it raises ConnectionError.
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
        self.posted = 0
        """How often the whole table was posted: 1 in a quiet life."""
        self._client = client
        self._key = f"{prefix}ledger:".encode()
        self._keys = (self._key,)
        self._ttl_ms = int(heartbeat_ttl_s * 1000)
        self._budget_s = reserve_budget_s
        self._board = Board()
        self._versions: dict[str, bytes] = {}
        self._heard_at = time.monotonic()
        self._now_s = 0.0
        self._closed = False
        self._generation = 0
        self._unsure = True
        self._posting = asyncio.Lock()
        self._seen_errors = client.posted_errors
        self._snapshot_of = -1
        self._version = 0
        self._before_us = client.on_connected
        client.on_connected = self._on_connected

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """As the contract says.

        Raises:
            ConnectionError: Redis is away or too slow; `reserve_locally` can be asked instead.
            ValueError: the id is held already.
        """
        if reservation.id in self._board.book:
            raise ValueError(f"reservation {reservation.id} is held already: release it before")
        if self._unsure or self._closed:
            await self._post_if_unsure()
        reply, generation = await self._try_reserve(reservation, limits, now_s)
        if reply == STALE:
            self._unsure = self._unsure or generation == self._generation
            await self._post_if_unsure()
            reply, generation = await self._try_reserve(reservation, limits, now_s)
        if reply not in (TAKEN, TAKEN_AND_WAITS):
            if reply in _REASONS:
                return _REASONS[reply]
            self._unsure = True
            raise ConnectionError("the ledger's table is being replaced faster than it can be used")
        if reservation.id in self._board.book:
            self._unsure = True
            raise ValueError(f"reservation {reservation.id} was asked for twice at once")
        self._board.book.add(reservation, now_s, waits=reply == TAKEN_AND_WAITS)
        if generation != self._generation:
            # Taken, and then wiped by a posting of the table that did not know of it yet.
            self._unsure = True
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
            self._board.book.add(reservation, now_s, waits=waits)
            self._unsure = True
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
        entry = self._board.in_line(reservation.id)
        if self._unsure or self._closed:
            raise ConnectionError("Redis does not hold the ledger's table as it is")
        generation = self._generation
        reply = await self._ask(MOVE, self._move_arguments(entry, reservation, ahead_s, now_s))
        if reply == QUEUE_FULL:
            return False
        if reply == STALE:
            self._unsure = self._unsure or generation == self._generation
            raise ConnectionError("the ledger's table is to be posted anew")
        taken = reply == TAKEN and self._board.book.move(reservation) is not None
        if not taken or generation != self._generation:
            # Redis is not as the own table is: replaced meanwhile, or the request ended while it was asked.
            self._unsure = True
        if reply != TAKEN:
            raise ConnectionError("the ledger's table is being replaced faster than it can be used")
        return True

    def prefill_begun(self, reservation_id: str, now_s: float) -> None:
        entry = self._board.begin_prefill(reservation_id, now_s)
        if entry is None:
            return
        self._send(BEGIN, entry.reservation.id, repr(now_s), entry.queue, entry.cost_us)

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
        entry = self._board.held(reservation_id)
        for _ in range(2):
            await self._post_if_unsure()
            generation = self._generation
            reply = await self._ask(SEAT, self._seat_arguments(entry, decode, limits))
            if reply != STALE:
                break
            self._unsure = self._unsure or generation == self._generation
        if reply in _REASONS:
            return _REASONS[reply]
        taken = reply == TAKEN and self._board.book.seat(reservation_id, decode, now_s) is not None
        if not taken or generation != self._generation:
            # Redis is not as the own table is: replaced meanwhile, or the request ended while it was asked.
            self._unsure = True
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
            self._board.book.seat(reservation_id, decode, now_s)
            self._unsure = True
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
        if self._closed:
            return
        self._now_s = now_s
        if self._client.posted_errors != self._seen_errors:
            self._seen_errors = self._client.posted_errors
            self._unsure = True
        try:
            await self._post_if_unsure()
            if await self._beat(now_s) == STALE:
                self._unsure = True
                await self._post_if_unsure()
                await self._beat(now_s)
        except ConnectionError:
            if time.monotonic() - self._heard_at > PEERS_KEPT_S:
                self._keep_peers([])
            raise

    async def close(self) -> None:
        """Give back every reservation of this incarnation and leave; where Redis is away, peers reap it."""
        self._closed = True
        self._board = Board()
        self._client.on_connected = self._before_us
        try:
            await self._eval(LEAVE, self.incarnation, repr(self._now_s))
        except ConnectionError:
            return

    def _on_connected(self) -> None:
        # What was under way on the connection before may be lost, and this may be another Redis.
        self._unsure = True
        if self._before_us is not None:
            self._before_us()

    async def _try_reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> tuple[int, int]:
        """Ask Redis; returns its reply and the generation under which it was asked."""
        generation = self._generation
        arguments = (
            self.incarnation,
            generation,
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
        return await self._ask(RESERVE, arguments), generation

    def _move_arguments(
        self, entry: Entry, reservation: Reservation, ahead_s: float, now_s: float
    ) -> tuple[object, ...]:
        return (
            self.incarnation,
            self._generation,
            reservation.id,
            repr(now_s),
            entry.queue,
            entry.cost_us,
            reservation.prefill or reservation.decode,
            max(1, microseconds(reservation.prefill_cost_s)),
            microseconds(ahead_s),
        )

    def _seat_arguments(self, entry: Entry, decode: str, limits: SeatLimits) -> tuple[object, ...]:
        return (
            self.incarnation,
            self._generation,
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

    async def _ask(self, script: Script, arguments: tuple[object, ...]) -> int:
        """Ask for something that changes the row.

        Raises:
            ConnectionError: it was not answered; it may have been carried out all the same.
        """
        try:
            reply = await self._eval(script, *arguments, timeout_s=self._budget_s)
        except BaseException:
            # Also when the caller was cancelled.
            self._unsure = True
            raise
        return int(reply)

    def _tell(
        self, entry: Entry, now_s: float, *, leaves_prefill: bool, starts: bool = False, ends: bool = False
    ) -> None:
        reservation = entry.reservation
        self._send(
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

    def _send(self, script: Script, *arguments: str | int | bytes) -> None:
        """Send a change without waiting; where that fails the whole table is posted later."""
        if self._unsure or self._closed:
            return
        try:
            self._client.send_nowait(
                b"EVALSHA", script.sha, 1, self._key, self.incarnation, self._generation, *arguments
            )
        except ConnectionError:
            self._unsure = True

    async def _post_if_unsure(self) -> None:
        if self._closed:
            raise ConnectionError("this ledger was closed")
        if not self._unsure:
            return
        async with self._posting:
            if not self._unsure:
                return
            await self._post()

    async def _post(self) -> None:
        """Replace what Redis holds of this incarnation by the own table, under a new generation."""
        prefills = []
        decodes: dict[str, list[int]] = {}
        for entry in self._board.book.entries():
            reservation = entry.reservation
            if entry.prefilling:
                prefills.append((entry.queue, repr(entry.begun_s), reservation.id, str(entry.cost_us)))
            sums = decodes.setdefault(reservation.decode, [0, 0, 0, 0])
            for at in (0, 2) if entry.decoding else (0,):
                sums[at] += 1
                sums[at + 1] += reservation.kv_tokens
        since = [(instance, repr(since_s)) for instance, since_s in self._board.since_s.items()]
        table = _encode((prefills, [(instance, *sums) for instance, sums in decodes.items()], since))
        # Before anything is awaited: what changes from here on is sent after the table, under its generation.
        self._generation += 1
        self._unsure = False
        posting = (b"EVAL", POST.source, 1, self._key, self.incarnation, self._generation, self._ttl_ms)
        try:
            # `send_nowait` cannot answer "no such script", so Redis is told the scripts that it will name.
            named = [(b"SCRIPT", b"LOAD", script.source) for script in (BEGIN, END)]
            await self._client.call_many([*named, (*posting, table)])
        except BaseException as error:
            self._unsure = True
            if isinstance(error, ReplyError):
                raise ConnectionError(f"Redis refuses the ledger's table: {error}") from error
            raise
        self._snapshot_of = -1
        self.posted += 1

    async def _beat(self, now_s: float) -> int:
        """Keep alive, publish the own shares, read those of the peers; STALE when this one was reaped."""
        changes = self._board.book.changes
        snapshot = b""
        if changes != self._snapshot_of:
            self._version += 1
            snapshot = _encode(self._board.book.shares())
        known = [part for peer, version in self._versions.items() for part in (peer, version)]
        reply = await self._eval(
            BEAT,
            self.incarnation,
            self._generation,
            self._ttl_ms,
            repr(now_s),
            self._version,
            snapshot,
            *known,
        )
        if reply == STALE:
            return STALE
        self._snapshot_of = changes
        self._heard_at = time.monotonic()
        since, peers = reply
        self._board.since_s = {
            instance.decode(): float(since_s)
            for instance, since_s in zip(since[0::2], since[1::2], strict=True)
        }
        self._keep_peers([peer.decode() for peer in peers[0::3]])
        for peer, version, shares in zip(peers[0::3], peers[1::3], peers[2::3], strict=True):
            if shares:
                self._versions[peer.decode()] = version
                self._board.hear(peer.decode(), _decode(shares))
        return TAKEN

    def _keep_peers(self, present: list[str]) -> None:
        self._board.keep_peers(present)
        self._versions = {peer: version for peer, version in self._versions.items() if peer in present}

    async def _eval(self, script: Script, *args: object, timeout_s: float | None = None) -> Reply:
        try:
            return await self._client.eval(script, self._keys, args, timeout_s=timeout_s)  # type: ignore[arg-type]
        except ReplyError as error:
            raise ConnectionError(f"Redis refuses the ledger: {error}") from error
