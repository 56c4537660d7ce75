"""What one scheduler knows of all work in flight: its own table and what its peers last said of theirs.

Pure: time comes in as a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import merge
from math import inf

from mooncake_core.ledger.book import Book
from mooncake_core.ledger.contract import InstanceLoad, Limits, RefusalReason, Reservation, SeatLimits
from mooncake_core.ledger.share import End, Ends, Share
from mooncake_core.ledger.tally import Entry, microseconds


class Sum:
    """The shares of all incarnations at one instance, added up; only the head's countdown depends on time."""

    __slots__ = ("_came_s", "_head_us", "_queued_us", "still")

    still: InstanceLoad
    """The load but for its queued seconds; all of it where nothing is queued."""

    def __init__(self, shares: Sequence[Share]) -> None:
        queue = shares[0].queue if len(shares) == 1 else tuple(merge(*(share.queue for share in shares)))
        self._came_s, self._head_us = queue[0] if queue else (inf, 0)
        self._queued_us = sum([cost_us for _, cost_us in queue])
        waiting = shares[0].waiting
        if len(shares) > 1:
            waiting = tuple(sorted([each for share in shares for each in share.waiting]))
        if waiting:
            self._queued_us += sum([each.cost_us for each in waiting])
        if len(shares) == 1:
            one = shares[0]
            self.still = InstanceLoad(
                0.0, len(queue) + len(waiting), one.batch, one.arriving, one.kv_tokens, one.prefill_ends,
                one.decode_ends, waiting, one.queued_tokens,
            )  # fmt: skip
            return
        self.still = InstanceLoad(
            queued=len(queue) + len(waiting),
            batch=sum(share.batch for share in shares),
            arriving=sum(share.arriving for share in shares),
            kv_tokens=sum(share.kv_tokens for share in shares),
            prefill_ends=_add_ends([share.prefill_ends for share in shares]),
            decode_ends=_add_ends([share.decode_ends for share in shares]),
            waiting=waiting,
            queued_tokens=sum(share.queued_tokens for share in shares),
        )

    def queued_us(self, now_s: float, since_s: float) -> int:
        """Microseconds of prefill still ahead: one that overruns its prediction is about to end.

        Only the oldest of those handed to the instance runs.

        Args:
            now_s: The moment.
            since_s: When the prefill before the oldest one ended.
        """
        if not self._queued_us:
            return 0
        begun_s = since_s if since_s > self._came_s else self._came_s
        return self._queued_us - min(self._head_us, microseconds(now_s - begun_s))

    def at(self, now_s: float, since_s: float) -> InstanceLoad:
        """The load at a moment; arguments as for `queued_us`."""
        still = self.still
        if not still.queued:
            return still
        return InstanceLoad(
            self.queued_us(now_s, since_s) / 1e6,
            still.queued,
            still.batch,
            still.arriving,
            still.kv_tokens,
            still.prefill_ends,
            still.decode_ends,
            still.waiting,
            still.queued_tokens,
        )

    @property
    def anybody_waits(self) -> bool:
        """Whether a prefill waits for its turn."""
        return bool(self.still.waiting)

    @property
    def promised(self) -> int:
        """Requests in decode or on their way to it."""
        return self.still.batch + self.still.arriving

    @property
    def kv_tokens(self) -> int:
        """KV tokens of these requests."""
        return self.still.kv_tokens

    @property
    def batch(self) -> int:
        """Requests in decode."""
        return self.still.batch

    @property
    def decoding_kv_tokens(self) -> int:
        """KV tokens of those in decode."""
        return self.still.kv_tokens - sum([tokens for _, _, tokens in self.still.prefill_ends])


def _add_ends(all_ends: Sequence[Ends]) -> Ends:
    filled = [ends for ends in all_ends if ends]
    if len(filled) <= 1:
        return filled[0] if filled else ()
    total: dict[int, End] = {}
    for ends in filled:
        for bucket, requests, kv_tokens in ends:
            _, had_requests, had_tokens = total.get(bucket, (bucket, 0, 0))
            total[bucket] = (bucket, had_requests + requests, had_tokens + kv_tokens)
    return tuple(sorted(total.values()))


_IDLE = Sum((Share(),))


class Board:
    """The own book, the shares of the peers, and their sums by instance."""

    def __init__(self) -> None:
        self.book = Book()
        self.since_s: dict[str, float] = {}
        """Since when the oldest prefill under way is the oldest; absent = since it was handed over."""
        self._peers: dict[str, dict[str, Share]] = {}
        self._sums: dict[str, Sum] = {}
        self._touched = self.book.touched
        """Instances whose sum does not hold any more."""

    def exceeded(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """Which bound a reservation would break, if any: queue first, then batch, then KV memory."""
        if limits.queued_s != inf:
            queue = reservation.prefill or reservation.decode
            queued_us = self._sum(queue).queued_us(now_s, self.since_s.get(queue, 0.0))
            if queued_us + microseconds(reservation.prefill_cost_s) > microseconds(limits.queued_s):
                return RefusalReason.TTFT
        if not limits.batch and not limits.kv_tokens:
            return None
        decode = self._sum(reservation.decode)
        if limits.batch and decode.promised + 1 > limits.batch:
            return RefusalReason.TBT
        if limits.kv_tokens and decode.kv_tokens + reservation.kv_tokens > limits.kv_tokens:
            return RefusalReason.KV_MEMORY
        return None

    def has_to_wait(self, reservation: Reservation, now_s: float) -> bool:
        """Whether a prefill that is reserved now has to wait for its turn."""
        if reservation.waits_above_s == inf:
            return False
        queue = reservation.prefill or reservation.decode
        there = self._sum(queue)
        queued_us = there.queued_us(now_s, self.since_s.get(queue, 0.0))
        return there.anybody_waits or queued_us > microseconds(reservation.waits_above_s)

    def in_line(self, reservation_id: str) -> Entry:
        """A reservation of the own book whose prefill waits for its turn.

        Raises:
            LookupError: no such reservation waits.
        """
        entry = self.book.get(reservation_id)
        if entry is None or not entry.prefilling or entry.begun_s != inf:
            raise LookupError(f"no reservation {reservation_id} waits for its turn")
        return entry

    def begin_prefill(self, reservation_id: str, now_s: float) -> Entry | None:
        """The turn of a prefill of the own book has come; None when it did not wait, or is unknown."""
        return self.book.begin_prefill(reservation_id, now_s)

    def finish_prefill(self, reservation_id: str, now_s: float, *, held: bool = False) -> Entry | None:
        """A prefill of the own book ended (`Book.finish_prefill`); None when that was known, or no such."""
        entry = self.book.get(reservation_id)
        if entry is not None and entry.prefilling:
            self._leaves_queue(entry, now_s)
        return self.book.finish_prefill(reservation_id, now_s, held=held)

    def held(self, reservation_id: str) -> Entry:
        """A reservation of the own book that waits for a place.

        Raises:
            LookupError: no such reservation waits.
        """
        entry = self.book.get(reservation_id)
        if entry is None or entry.prefilling or entry.decoding:
            raise LookupError(f"no reservation {reservation_id} waits for a place to decode")
        return entry

    def seat_exceeded(self, kv_tokens: int, decode: str, limits: SeatLimits) -> RefusalReason | None:
        """Which bound a request with so much KV would break at a decode instance; None when it fits."""
        there = self._sum(decode)
        return limits.exceeded(there.batch, there.decoding_kv_tokens, kv_tokens)

    def drop(self, reservation_id: str, now_s: float) -> Entry | None:
        """A request of the own book ended. Its entry as it stood; None when it is unknown."""
        entry = self.book.get(reservation_id)
        if entry is not None:
            if entry.prefilling:
                self._leaves_queue(entry, now_s)
            self.book.drop(reservation_id)
        return entry

    def loads(self, now_s: float) -> dict[str, InstanceLoad]:
        """Load by instance; those without any are left out."""
        for instance in tuple(self._touched):
            self._add_up(instance)
        since_s = self.since_s
        return {
            instance: total.at(now_s, since_s.get(instance, 0.0)) if total.still.queued else total.still
            for instance, total in self._sums.items()
        }

    def load(self, instance: str, now_s: float) -> InstanceLoad:
        """The load of one instance."""
        return self._sum(instance).at(now_s, self.since_s.get(instance, 0.0))

    def hear(self, peer: str, shares: dict[str, Share]) -> None:
        """A peer said what it has promised."""
        before = self._peers.get(peer, {})
        self._touched.update(i for i in before.keys() | shares.keys() if before.get(i) != shares.get(i))
        self._peers[peer] = shares

    def keep_peers(self, present: Iterable[str]) -> None:
        """Forget the peers that are not among these."""
        for peer in self._peers.keys() - set(present):
            self._touched.update(self._peers.pop(peer))

    def _leaves_queue(self, entry: Entry, now_s: float) -> None:
        oldest_s = self.book.oldest_s(entry.queue)
        for shares in self._peers.values():
            share = shares.get(entry.queue)
            if share is not None and share.queue:
                oldest_s = min(oldest_s, share.queue[0][0])
        if entry.begun_s <= oldest_s:
            self.since_s[entry.queue] = now_s

    def _sum(self, instance: str) -> Sum:
        """What all have promised to an instance."""
        if instance in self._touched:
            self._add_up(instance)
        return self._sums.get(instance, _IDLE)

    def _add_up(self, instance: str) -> None:
        self._touched.discard(instance)
        shares = [shares[instance] for shares in self._peers.values() if instance in shares]
        own = self.book.share(instance)
        if own is not None:
            shares.append(own)
        if shares:
            self._sums[instance] = Sum(shares)
        else:
            self._sums.pop(instance, None)
            self.since_s.pop(instance, None)
