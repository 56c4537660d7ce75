"""The table of one incarnation's reservations, with its sums by instance. Pure: time is a parameter."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from msgspec.structs import replace

from mooncake_core.ledger.contract import Reservation
from mooncake_core.ledger.share import Share, Waiting
from mooncake_core.ledger.tally import Entry, Tally, bucket_of, microseconds


class Book:
    """Reservations of one incarnation, with their sums by instance kept up to date."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tallies: dict[str, Tally] = {}
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
        decode.join_arriving(entry)
        decode.join_ends(entry)
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
        decode.leave_arriving(entry)
        decode.leave_ends(entry)
        if held:
            entry.arrival_bucket = bucket_of(now_s)
            decode.join_arriving(entry)
        else:
            entry.decoding = True
            decode.batch += 1
        entry.decodes_from(now_s)
        decode.join_ends(entry)
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
        decode.leave_arriving(entry)
        decode.leave_ends(entry)
        entry.reservation = reservation
        entry.cost_us = max(1, microseconds(reservation.prefill_cost_s))
        entry.arrival_bucket = bucket_of(reservation.prefill_end_s)
        entry.decode_bucket = bucket_of(reservation.decode_end_s)
        queue = self._tally(entry.queue)
        queue.waiting[reservation.id] = Waiting(entry.reserved_s, entry.cost_us, reservation.latest_end_s)
        # It keeps its age, and those that wait stand by that.
        queue.waiting = dict(sorted(queue.waiting.items(), key=lambda each: each[1]))
        queue.queued_tokens += reservation.prefill_tokens
        decode.join_arriving(entry)
        decode.join_ends(entry)
        return entry

    def seat(self, reservation_id: str, decode: str, now_s: float) -> Entry | None:
        """Give a request that waits its place at a decode instance, maybe another one than was promised.

        None when it is unknown or does not wait. Its decode is as long as predicted and begins now.
        """
        entry = self._entries.get(reservation_id)
        if entry is None or entry.prefilling or entry.decoding:
            return None
        before = self._tally(entry.reservation.decode)
        before.leave_arriving(entry)
        before.leave_ends(entry)
        before.kv_tokens -= entry.reservation.kv_tokens
        if decode != entry.reservation.decode:
            entry.reservation = replace(entry.reservation, decode=decode)
        entry.decoding = True
        tally = self._tally(decode)
        tally.batch += 1
        tally.kv_tokens += entry.reservation.kv_tokens
        entry.decodes_from(now_s)
        tally.join_ends(entry)
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
            decode.leave_arriving(entry)
        decode.kv_tokens -= entry.reservation.kv_tokens
        decode.leave_ends(entry)
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
        return tally.seen()

    def _leave_queue(self, entry: Entry) -> None:
        queue = self._tally(entry.queue)
        del (queue.waiting if entry.begun_s == inf else queue.queue)[entry.reservation.id]
        queue.queued_tokens -= entry.reservation.prefill_tokens

    def _tally(self, instance: str) -> Tally:
        """The tally of an instance, about to be changed."""
        tally = self._tallies.get(instance)
        if tally is None:
            tally = self._tallies[instance] = Tally()
        tally.share = None
        self.touched.add(instance)
        self.changes += 1
        return tally
