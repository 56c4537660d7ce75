"""One reservation as it stands, and the sums of those at one instance.

Pure: time comes in as a parameter. Seconds of prefill are counted in whole microseconds and KV in whole
tokens, so that sums are exact: what was added and taken away again leaves zero.
"""

from __future__ import annotations

import msgspec

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

    def decodes_from(self, begins_s: float) -> None:
        """Its decode is as long as predicted, from the moment at which it begins."""
        length_s = max(0.0, self.reservation.decode_end_s - self.reservation.prefill_end_s)
        self.decode_bucket = bucket_of(begins_s + length_s)

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


class Tally:
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
        """Whether nothing is promised here."""
        return not (self.queue or self.waiting or self.batch or self.arriving)

    def join_arriving(self, entry: Entry) -> None:
        """One more is on its way to decode here."""
        self.arriving += 1
        _count(self.prefill_ends, entry.arrival_bucket, 1, entry.reservation.kv_tokens)

    def leave_arriving(self, entry: Entry) -> None:
        """It is not on its way any more."""
        self.arriving -= 1
        _count(self.prefill_ends, entry.arrival_bucket, -1, -entry.reservation.kv_tokens)

    def join_ends(self, entry: Entry) -> None:
        """Its decode is predicted to end when the entry says."""
        _count(self.decode_ends, entry.decode_bucket, 1, entry.reservation.kv_tokens)

    def leave_ends(self, entry: Entry) -> None:
        """That prediction counts no more."""
        _count(self.decode_ends, entry.decode_bucket, -1, -entry.reservation.kv_tokens)

    def seen(self) -> Share:
        """What peers get to know, made anew only after a change."""
        if self.share is None:
            self.share = Share(
                tuple(self.queue.values()),
                self.batch,
                self.arriving,
                self.kv_tokens,
                tuple(sorted(self.prefill_ends.values())),
                tuple(sorted(self.decode_ends.values())),
                tuple(self.waiting.values()),
                self.queued_tokens,
            )
        return self.share


def _count(ends: dict[int, End], bucket: int, requests: int, kv_tokens: int) -> None:
    had = ends.get(bucket)
    if had is None:
        ends[bucket] = (bucket, requests, kv_tokens)
    elif had[1] + requests:
        ends[bucket] = (bucket, had[1] + requests, had[2] + kv_tokens)
    else:
        del ends[bucket]
