"""What a decode instance will carry when a request arrives there, from the ledger's predicted ends.

The paper's prediction (arXiv 2407.00079 §7.4): to the load of now, add the requests whose prefill will have
ended by then, and remove those whose decode will have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from mooncake_core.ledger import InstanceLoad, Reservation
from mooncake_core.ledger.contract import BUCKET_S


class DecodeLoad(NamedTuple):
    """What a decode instance carries at one moment."""

    batch: int
    """Requests in decode."""
    kv_tokens: int
    """KV tokens of those in decode, each with its predicted output (so with its growth)."""
    promised_kv_tokens: int
    """`kv_tokens` and those of requests that arrive later: what memory has to hold."""


def decode_now(load: InstanceLoad) -> DecodeLoad:
    """The load as it is, blind to those still in prefill: the stale view that makes early rejection swing."""
    arriving_kv_tokens = 0
    for _, _, kv_tokens in load.prefill_ends:
        arriving_kv_tokens += kv_tokens
    return DecodeLoad(load.batch, max(0, load.kv_tokens - arriving_kv_tokens), load.kv_tokens)


def decode_at(load: InstanceLoad, now_s: float, at_s: float) -> DecodeLoad:
    """The load predicted for `at_s`, seen from `now_s`.

    Whoever is overdue (predicted to have ended before now, yet still in the ledger) stays: an arrival may
    come any moment, and how much longer an overrunning decode lasts is unknown. Buckets count
    towards more load: an arrival in the bucket of `at_s` has arrived, an end in it has not come.
    """
    now_bucket = int(now_s / BUCKET_S)
    at_bucket = int(at_s / BUCKET_S)
    batch = load.batch + load.arriving
    kv_tokens = promised = load.kv_tokens
    for bucket, requests, tokens in load.prefill_ends:
        if bucket > at_bucket:
            batch -= requests
            kv_tokens -= tokens
    for bucket, requests, tokens in load.decode_ends:
        if now_bucket <= bucket < at_bucket:
            batch -= requests
            kv_tokens -= tokens
            promised -= tokens
    # Clipped without max(), which is slow where it is asked most.
    return DecodeLoad(
        batch if batch > 0 else 0, kv_tokens if kv_tokens > 0 else 0, promised if promised > 0 else 0
    )


def without_arriving(load: InstanceLoad, reservation: Reservation) -> InstanceLoad:
    """A decode instance's load without one of those that have not reached decode.

    Args:
        load: With the request in it.
        reservation: The request's, as it was reserved.
    """
    kv_tokens = reservation.kv_tokens
    return replace(
        load,
        arriving=max(0, load.arriving - 1),
        kv_tokens=max(0, load.kv_tokens - kv_tokens),
        prefill_ends=_less(load.prefill_ends, int(reservation.prefill_end_s / BUCKET_S), kv_tokens),
        decode_ends=_less(load.decode_ends, int(reservation.decode_end_s / BUCKET_S), kv_tokens),
    )


def _less(
    ends: Sequence[tuple[int, int, int]], bucket: int, kv_tokens: int
) -> Sequence[tuple[int, int, int]]:
    left = []
    for each, requests, tokens in ends:
        if each != bucket:
            left.append((each, requests, tokens))
        elif requests > 1:
            left.append((each, requests - 1, max(0, tokens - kv_tokens)))
    return left


def decode_course(load: InstanceLoad, now_s: float, from_s: float) -> Iterator[tuple[float, DecodeLoad]]:
    """The predicted load at `from_s` and after each later change: (since when, load), in order of time."""
    first = decode_at(load, now_s, from_s)
    yield from_s, first
    from_bucket = int(from_s / BUCKET_S)
    now_bucket = int(now_s / BUCKET_S)
    changes: dict[int, tuple[int, int, int]] = {}
    for bucket, requests, tokens in load.prefill_ends:
        if bucket > from_bucket:
            batch, kv_tokens, promised = changes.get(bucket, (0, 0, 0))
            changes[bucket] = (batch + requests, kv_tokens + tokens, promised)
    for bucket, requests, tokens in load.decode_ends:
        if bucket >= max(from_bucket, now_bucket):
            # One later than the bucket itself: only then has the last of it ended.
            batch, kv_tokens, promised = changes.get(bucket + 1, (0, 0, 0))
            changes[bucket + 1] = (batch - requests, kv_tokens - tokens, promised - tokens)
    batch, kv_tokens, promised = first
    for bucket in sorted(changes):
        more = changes[bucket]
        batch, kv_tokens, promised = batch + more[0], kv_tokens + more[1], promised + more[2]
        yield bucket * BUCKET_S, DecodeLoad(max(0, batch), max(0, kv_tokens), max(0, promised))
