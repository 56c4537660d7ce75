"""The table of one incarnation's reservations, with its sums by instance.

Pure: time comes in as a parameter. Seconds of prefill are counted in whole microseconds and KV in whole
tokens, so that sums are exact: what was added and taken away again leaves zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import msgspec
from msgspec.structs import replace

from mooncake_core.ledger.contract import BUCKET_S, Reservation
from mooncake_core.ledger.share import End, Queued, Share, Waiting


class Entry(msgspec.Struct, gc=False):
    """A reservation with where it stands."""

    reservation: Reservation
    reserved_s: float
    cost_us: int
    arrival_bucket: int
    """When decode is predicted to begin; of a prompt that was computed and is held, when that was."""
    decode_bucket: int
    begun_s: float
    """When its prefill was handed to its instance; inf = it waits for its turn."""
    prefilling: bool = True
    decoding: bool = False
    """Neither: it was prefilled, and is held until it has a place to decode."""

    @property
    def queue(self) -> str:
        """The instance whose time the prefill takes: the decode instance where that one prefills itself."""
        return self.reservation.prefill or self.reservation.decode


def microseconds(seconds: float) -> int:
    """Whole microseconds of a duration, rounded as the scripts round; negative ones count as none."""
    return int(seconds * 1e6 + 0.5) if seconds > 0 else 0


def bucket_of(at_s: float) -> int:
    """The bucket in which a moment is counted."""
    return int(at_s / BUCKET_S)


class _Tally:
    """The sums of one incarnation at one instance."""

    __slots__ = (
        "arriving", "batch", "decode_ends", "kv_tokens", "prefill_ends", "queue", "queued_tokens",
        "share", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue: dict[str, Queued] = {}
        self.waiting: dict[str, Waiting] = {}
        self.queued_tokens = 0
        self.batch = 0
        self.arriving = 0
        self.kv_tokens = 0
        self.prefill_ends: dict[int, End] = {}
        self.decode_ends: dict[int, End] = {}
        self.share: Share | None = None

    @property
    def empty(self) -> bool:
        return not (self.queue or self.waiting or self.batch or self.arriving)


def _count(ends: dict[int, End], bucket: int, requests: int, kv_tokens: int) -> None:
    had = ends.get(bucket)
    if had is None:
        ends[bucket] = (bucket, requests, kv_tokens)
    elif had[1] + requests:
        ends[bucket] = (bucket, had[1] + requests, had[2] + kv_tokens)
    else:
        del ends[bucket]


class Book:
    """Reservations of one incarnation, with their sums by instance kept up to date."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tallies: dict[str, _Tally] = {}
        self.touched: set[str] = set()
        """Instances whose share changed since the reader last emptied this set."""
        self.changes = 0
        """Grows with every change."""

    def __contains__(self, reservation_id: str) -> bool:
        return reservation_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, reservation_id: str) -> Entry | None:
        """A reservation, by its id."""
        return self._entries.get(reservation_id)

    def waiting(self, reservation_id: str) -> Waiting | None:
        """What of a prefill that waits for its turn decides when that is; None when it does not wait."""
        entry = self._entries.get(reservation_id)
        if entry is None or not entry.prefilling:
            return None
        return self._tallies[entry.queue].waiting.get(reservation_id)

    def entries(self) -> Iterable[Entry]:
        """All reservations, oldest first."""
        return self._entries.values()

    def add(self, reservation: Reservation, now_s: float, *, waits: bool = False) -> Entry:
        """Write a reservation down.

        Args:
            reservation: What was taken.
            now_s: The moment.
            waits: Its prefill is held back until its turn comes.

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
            # Never 0: a queued prefill must show in the sum that is kept by instance in Redis.
            max(1, microseconds(reservation.prefill_cost_s)),
            bucket_of(reservation.prefill_end_s),
            bucket_of(reservation.decode_end_s),
            inf if waits else now_s,
        )
        self._entries[reservation.id] = entry
        decode = self._tally(reservation.decode)
        queue = self._tally(reservation.prefill) if reservation.prefill else decode
        if waits:
            queue.waiting[reservation.id] = Waiting(now_s, entry.cost_us, reservation.latest_end_s)
        else:
            queue.queue[reservation.id] = (now_s, entry.cost_us)
        queue.queued_tokens += reservation.prefill_tokens
        decode.kv_tokens += reservation.kv_tokens
        self._join_arriving(entry, decode)
        _count(decode.decode_ends, entry.decode_bucket, 1, reservation.kv_tokens)
        return entry

    def begin_prefill(self, reservation_id: str, now_s: float) -> Entry | None:
        """A prefill that waited is handed to its instance; None when it did not wait, or is unknown."""
        entry = self._entries.get(reservation_id)
        if entry is None or not entry.prefilling or entry.begun_s != inf:
            return None
        queue = self._tally(entry.queue)
        del queue.waiting[reservation_id]
        queue.queue[reservation_id] = (now_s, entry.cost_us)
        entry.begun_s = now_s
        return entry

    def finish_prefill(self, reservation_id: str, now_s: float, *, held: bool = False) -> Entry | None:
        """A request's prompt is computed; None when it is unknown or that is known already.

        It decodes from now on, or counts as arriving until it is given a place.

        Args:
            reservation_id: of the request.
            now_s: when it is.
            held: it waits for a place (`seat`).
        """
        entry = self._entries.get(reservation_id)
        if entry is None or not entry.prefilling:
            return None
        reservation = entry.reservation
        self._leave_queue(entry)
        entry.prefilling = False
        decode = self._tally(reservation.decode)
        self._leave_arriving(entry, decode)
        self._leave_ends(entry, decode)
        if held:
            entry.arrival_bucket = bucket_of(now_s)
            self._join_arriving(entry, decode)
        else:
            entry.decoding = True
            decode.batch += 1
        self._join_ends(entry, decode, now_s)
        return entry

    def move(self, reservation: Reservation) -> Entry | None:
        """Let a prefill that waits for its turn wait at another instance; None when it does not wait.

        Args:
            reservation: As the one of the same id, but for its prefill, what that costs and when it ends.
        """
        entry = self._entries.get(reservation.id)
        if entry is None or not entry.prefilling or entry.begun_s != inf:
            return None
        if (reservation.decode, reservation.kv_tokens) != (
            entry.reservation.decode, entry.reservation.kv_tokens,
        ):  # fmt: skip
            raise ValueError(f"reservation {reservation.id}: only its prefill can be moved")
        self._leave_queue(entry)
        decode = self._tally(reservation.decode)
        self._leave_arriving(entry, decode)
        self._leave_ends(entry, decode)
        entry.reservation = reservation
        entry.cost_us = max(1, microseconds(reservation.prefill_cost_s))
        entry.arrival_bucket = bucket_of(reservation.prefill_end_s)
        entry.decode_bucket = bucket_of(reservation.decode_end_s)
        queue = self._tally(entry.queue)
        queue.waiting[reservation.id] = Waiting(entry.reserved_s, entry.cost_us, reservation.latest_end_s)
        # It keeps its age, and those that wait stand by that.
        queue.waiting = dict(sorted(queue.waiting.items(), key=lambda each: each[1]))
        queue.queued_tokens += reservation.prefill_tokens
        self._join_arriving(entry, decode)
        _count(decode.decode_ends, entry.decode_bucket, 1, reservation.kv_tokens)
        return entry

    def seat(self, reservation_id: str, decode: str, now_s: float) -> Entry | None:
        """Give a request that waits its place at a decode instance, maybe another one than was promised.

        None when it is unknown or does not wait. Its decode is as long as predicted and begins now.
        """
        entry = self._entries.get(reservation_id)
        if entry is None or entry.prefilling or entry.decoding:
            return None
        before = self._tally(entry.reservation.decode)
        self._leave_arriving(entry, before)
        self._leave_ends(entry, before)
        before.kv_tokens -= entry.reservation.kv_tokens
        if decode != entry.reservation.decode:
            entry.reservation = replace(entry.reservation, decode=decode)
        entry.decoding = True
        tally = self._tally(decode)
        tally.batch += 1
        tally.kv_tokens += entry.reservation.kv_tokens
        self._join_ends(entry, tally, now_s)
        return entry

    def drop(self, reservation_id: str) -> Entry | None:
        """Strike a reservation out; returned as it stood, None when it is unknown."""
        entry = self._entries.pop(reservation_id, None)
        if entry is None:
            return None
        if entry.prefilling:
            self._leave_queue(entry)
        decode = self._tally(entry.reservation.decode)
        if entry.decoding:
            decode.batch -= 1
        else:
            self._leave_arriving(entry, decode)
        decode.kv_tokens -= entry.reservation.kv_tokens
        self._leave_ends(entry, decode)
        return entry

    def oldest_s(self, instance: str) -> float:
        """When the oldest prefill under way at an instance was handed to it; inf without one."""
        tally = self._tallies.get(instance)
        return next(iter(tally.queue.values()))[0] if tally is not None and tally.queue else inf

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
                tally.batch,
                tally.arriving,
                tally.kv_tokens,
                tuple(sorted(tally.prefill_ends.values())),
                tuple(sorted(tally.decode_ends.values())),
                tuple(tally.waiting.values()),
                tally.queued_tokens,
            )
        return tally.share

    def _leave_queue(self, entry: Entry) -> None:
        queue = self._tally(entry.queue)
        del (queue.waiting if entry.begun_s == inf else queue.queue)[entry.reservation.id]
        queue.queued_tokens -= entry.reservation.prefill_tokens

    @staticmethod
    def _join_arriving(entry: Entry, decode: _Tally) -> None:
        decode.arriving += 1
        _count(decode.prefill_ends, entry.arrival_bucket, 1, entry.reservation.kv_tokens)

    @staticmethod
    def _leave_arriving(entry: Entry, decode: _Tally) -> None:
        decode.arriving -= 1
        _count(decode.prefill_ends, entry.arrival_bucket, -1, -entry.reservation.kv_tokens)

    @staticmethod
    def _join_ends(entry: Entry, decode: _Tally, begins_s: float) -> None:
        """Its decode is as long as predicted, from the moment at which it begins."""
        reservation = entry.reservation
        entry.decode_bucket = bucket_of(
            begins_s + max(0.0, reservation.decode_end_s - reservation.prefill_end_s)
        )
        _count(decode.decode_ends, entry.decode_bucket, 1, reservation.kv_tokens)

    @staticmethod
    def _leave_ends(entry: Entry, decode: _Tally) -> None:
        _count(decode.decode_ends, entry.decode_bucket, -1, -entry.reservation.kv_tokens)

    def _tally(self, instance: str) -> _Tally:
        """The tally of an instance, about to be changed."""
        tally = self._tallies.get(instance)
        if tally is None:
            tally = self._tallies[instance] = _Tally()
        tally.share = None
        self.touched.add(instance)
        self.changes += 1
        return tally
