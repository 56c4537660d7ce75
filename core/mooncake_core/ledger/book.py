"""The table of one incarnation's reservations, and how the tables of several add up to an instance's load.

Pure: time comes in as a parameter. Seconds of prefill are counted in whole microseconds and KV in whole
tokens, so that sums are exact: what was added and taken away again leaves zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from math import inf
from typing import TypeAlias

import msgspec

from mooncake_core.ledger.contract import BUCKET_S, InstanceLoad, Limits, RefusalReason, Reservation

Queued: TypeAlias = tuple[float, int]
"""(when it was reserved in seconds, predicted prefill in microseconds)"""
Ends: TypeAlias = tuple[tuple[int, int, int], ...]
"""(bucket, requests, KV tokens), by bucket"""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one incarnation has promised to one instance. Travels between schedulers as msgpack."""

    queue: tuple[Queued, ...] = ()
    """Prefills not finished, oldest first."""
    head_changed_s: float = 0.0
    """When this incarnation last took the oldest prefill away."""
    batch: int = 0
    arriving: int = 0
    kv_tokens: int = 0
    prefill_ends: Ends = ()
    decode_ends: Ends = ()


class Entry(msgspec.Struct):
    """A reservation with where it stands."""

    reservation: Reservation
    reserved_s: float
    cost_us: int
    decode_bucket: int
    prefilling: bool = True

    @property
    def queue(self) -> str:
        """The instance whose time the prefill takes: the decode instance where that one prefills itself."""
        return self.reservation.prefill or self.reservation.decode


def microseconds(seconds: float) -> int:
    """Whole microseconds of a duration; negative durations count as none."""
    return max(0, round(seconds * 1e6))


def bucket_of(at_s: float) -> int:
    """The bucket in which a moment is counted."""
    return int(at_s / BUCKET_S)


class _Tally:
    """The sums of one incarnation at one instance."""

    __slots__ = (
        "arriving", "batch", "decode_ends", "head_changed_s", "kv_tokens", "prefill_ends", "queue", "share",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue: dict[str, Queued] = {}
        self.head_changed_s = 0.0
        self.batch = 0
        self.arriving = 0
        self.kv_tokens = 0
        self.prefill_ends: dict[int, tuple[int, int]] = {}
        self.decode_ends: dict[int, tuple[int, int]] = {}
        self.share: Share | None = None

    @property
    def empty(self) -> bool:
        return not (self.queue or self.batch or self.arriving)


def _count(ends: dict[int, tuple[int, int]], bucket: int, requests: int, kv_tokens: int) -> None:
    had_requests, had_tokens = ends.get(bucket, (0, 0))
    if had_requests + requests:
        ends[bucket] = (had_requests + requests, had_tokens + kv_tokens)
    else:
        del ends[bucket]


def _sorted_ends(ends: Mapping[int, tuple[int, int]]) -> Ends:
    return tuple((bucket, *ends[bucket]) for bucket in sorted(ends))


class Book:
    """Reservations of one incarnation, with their sums by instance kept up to date."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tallies: dict[str, _Tally] = {}
        self.touched: set[str] = set()
        """Instances whose share changed since the reader last emptied this set."""

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> Iterable[Entry]:
        """All reservations, oldest first."""
        return self._entries.values()

    def add(self, reservation: Reservation, now_s: float) -> Entry:
        """Write a reservation down.

        Raises:
            ValueError: its id is taken; release it first.
        """
        if reservation.id in self._entries:
            raise ValueError(
                f"reservation {reservation.id} is held already: release it before it is reserved again"
            )
        entry = Entry(
            reservation,
            now_s,
            microseconds(reservation.prefill_cost_s),
            bucket_of(reservation.decode_end_s),
        )
        self._entries[reservation.id] = entry
        self._tally(entry.queue).queue[reservation.id] = (now_s, entry.cost_us)
        decode = self._tally(reservation.decode)
        decode.arriving += 1
        decode.kv_tokens += reservation.kv_tokens
        _count(decode.prefill_ends, bucket_of(reservation.prefill_end_s), 1, reservation.kv_tokens)
        _count(decode.decode_ends, entry.decode_bucket, 1, reservation.kv_tokens)
        return entry

    def finish_prefill(self, reservation_id: str, now_s: float) -> Entry | None:
        """Move a request from prefill to decode; None when it is unknown or already there.

        Its decode is as long as predicted but begins now, so its predicted end moves along.
        """
        entry = self._entries.get(reservation_id)
        if entry is None or not entry.prefilling:
            return None
        self._leave_prefill(entry, now_s)
        reservation = entry.reservation
        decode = self._tally(reservation.decode)
        decode.batch += 1
        _count(decode.decode_ends, entry.decode_bucket, -1, -reservation.kv_tokens)
        entry.decode_bucket = bucket_of(
            now_s + max(0.0, reservation.decode_end_s - reservation.prefill_end_s)
        )
        _count(decode.decode_ends, entry.decode_bucket, 1, reservation.kv_tokens)
        return entry

    def drop(self, reservation_id: str, now_s: float) -> Entry | None:
        """Strike a reservation out; None when it is unknown."""
        entry = self._entries.pop(reservation_id, None)
        if entry is None:
            return None
        reservation = entry.reservation
        decode = self._tally(reservation.decode)
        if entry.prefilling:
            self._leave_prefill(entry, now_s)
        else:
            decode.batch -= 1
        decode.kv_tokens -= reservation.kv_tokens
        _count(decode.decode_ends, entry.decode_bucket, -1, -reservation.kv_tokens)
        return entry

    def shares(self) -> dict[str, Share]:
        """The share of every instance to which something is promised."""
        return {instance: share for instance in list(self._tallies) if (share := self.share(instance))}

    def share(self, instance: str) -> Share | None:
        """What is promised to one instance; None when nothing is."""
        tally = self._tallies.get(instance)
        if tally is None:
            return None
        if tally.empty:
            del self._tallies[instance]
            return None
        if tally.share is None:
            tally.share = Share(
                tuple(tally.queue.values()),
                tally.head_changed_s,
                tally.batch,
                tally.arriving,
                tally.kv_tokens,
                _sorted_ends(tally.prefill_ends),
                _sorted_ends(tally.decode_ends),
            )
        return tally.share

    def _leave_prefill(self, entry: Entry, now_s: float) -> None:
        reservation = entry.reservation
        entry.prefilling = False
        queue = self._tally(entry.queue)
        if next(iter(queue.queue)) == reservation.id:
            queue.head_changed_s = max(queue.head_changed_s, now_s)
        del queue.queue[reservation.id]
        decode = self._tally(reservation.decode)
        decode.arriving -= 1
        _count(decode.prefill_ends, bucket_of(reservation.prefill_end_s), -1, -reservation.kv_tokens)

    def _tally(self, instance: str) -> _Tally:
        """The tally of an instance, about to be changed."""
        tally = self._tallies.get(instance)
        if tally is None:
            tally = self._tallies[instance] = _Tally()
        tally.share = None
        self.touched.add(instance)
        return tally


class Sum:
    """The shares of all incarnations at one instance, added up; only the head's countdown depends on time."""

    __slots__ = ("_head_us", "_queued_us", "_since_s", "_still")

    def __init__(self, shares: Sequence[Share]) -> None:
        queue = shares[0].queue if len(shares) == 1 else tuple(merge(*(share.queue for share in shares)))
        self._queued_us = sum(cost_us for _, cost_us in queue)
        self._head_us = queue[0][1] if queue else 0
        # The oldest prefill runs since the one before it ended, or since it came to an idle instance.
        self._since_s = max(queue[0][0], *(share.head_changed_s for share in shares)) if queue else 0.0
        self._still = InstanceLoad(
            queued=len(queue),
            batch=sum(share.batch for share in shares),
            arriving=sum(share.arriving for share in shares),
            kv_tokens=sum(share.kv_tokens for share in shares),
            prefill_ends=_add_ends([share.prefill_ends for share in shares]),
            decode_ends=_add_ends([share.decode_ends for share in shares]),
        )

    def queued_us(self, now_s: float) -> int:
        """Microseconds of prefill still ahead: a prefill that overruns its prediction is about to end."""
        if not self._queued_us:
            return 0
        return self._queued_us - min(self._head_us, microseconds(now_s - self._since_s))

    def at(self, now_s: float) -> InstanceLoad:
        """The load at a moment."""
        still = self._still
        if not still.queued:
            return still
        return InstanceLoad(
            self.queued_us(now_s) / 1e6,
            still.queued,
            still.batch,
            still.arriving,
            still.kv_tokens,
            still.prefill_ends,
            still.decode_ends,
        )

    @property
    def promised(self) -> int:
        """Requests in decode or on their way to it."""
        return self._still.batch + self._still.arriving

    @property
    def kv_tokens(self) -> int:
        """KV tokens of these requests."""
        return self._still.kv_tokens


def _add_ends(all_ends: Sequence[Ends]) -> Ends:
    filled = [ends for ends in all_ends if ends]
    if len(filled) <= 1:
        return filled[0] if filled else ()
    total: dict[int, tuple[int, int]] = {}
    for ends in filled:
        for bucket, requests, kv_tokens in ends:
            had_requests, had_tokens = total.get(bucket, (0, 0))
            total[bucket] = (had_requests + requests, had_tokens + kv_tokens)
    return _sorted_ends(total)


IDLE = Sum((Share(),))
"""An instance to which nothing is promised."""


def exceeded(
    reservation: Reservation, limits: Limits, queue: Sum, decode: Sum, now_s: float
) -> RefusalReason | None:
    """Which bound a reservation would break, if any: queue first, then batch, then KV memory."""
    if limits.queued_s != inf:
        needed_us = queue.queued_us(now_s) + microseconds(reservation.prefill_cost_s)
        if needed_us > microseconds(limits.queued_s):
            return RefusalReason.TTFT
    if limits.batch and decode.promised + 1 > limits.batch:
        return RefusalReason.TBT
    if limits.kv_tokens and decode.kv_tokens + reservation.kv_tokens > limits.kv_tokens:
        return RefusalReason.KV_MEMORY
    return None
