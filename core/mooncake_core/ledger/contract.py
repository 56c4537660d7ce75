"""The ledger contract: reservations of work in flight, shared by all schedulers of a cluster.

Times are seconds of one clock that all schedulers share (Unix time times the cluster's time scale, so model
seconds where engines are simulated faster than life). A scheduler process is one *incarnation*; a dead one's
reservations are reaped by its live peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import Protocol

import msgspec

from mooncake_core.ledger.share import Waiting

BUCKET_S = 0.1
"""Width of the buckets in which predicted ends are counted."""


class RefusalReason(StrEnum):
    """Why a request is refused; the machine-readable reason of the HTTP 429."""

    TTFT = "ttft"
    TBT = "tbt"
    KV_MEMORY = "kv_memory"
    TENANT_QUOTA = "tenant_quota"


class Reservation(msgspec.Struct, frozen=True, gc=False):
    """What one admitted request takes, from admission to its last token."""

    id: str
    prefill: str | None
    """Instance that computes the prompt; None when the decode instance does it itself."""
    prefill_cost_s: float
    """Predicted seconds that the prefill keeps its instance busy."""
    decode: str
    kv_tokens: int
    """Tokens of KV that the request is expected to need on the decode instance: prompt and output."""
    prefill_end_s: float
    """When the request is predicted to reach decode."""
    decode_end_s: float
    """When its last token is predicted."""
    tenant: str = "default"
    waits_above_s: float = inf
    """Its prefill waits for its turn (`Ledger.prefill_begun`) where more than that is queued at its instance,
    or others wait there; else it is sent at once. inf = it never waits."""
    latest_end_s: float = inf
    """When its prefill has to have ended, as was promised; inf = nothing was."""
    prefill_tokens: int = 0
    """Tokens of the prompt that the prefill computes."""


class Limits(msgspec.Struct, frozen=True, gc=False):
    """Bounds that `reserve` checks again at the last moment, atomically over all schedulers."""

    queued_s: float = inf
    """Most queued prefill seconds on the prefill instance, this request's own cost included."""
    batch: int = 0
    """Most requests decoding or promised on the decode instance; 0 = no bound."""
    kv_tokens: int = 0
    """KV tokens that fit on the decode instance; 0 = no bound."""


class SeatLimits(msgspec.Struct, frozen=True, gc=False):
    """What a decode instance may carry, checked by `seat` atomically over all schedulers.

    Only what decodes there counts, not what is promised; an empty instance takes whatever comes.
    """

    batch: int = 0
    """Most requests decoding; 0 = no bound."""
    kv_tokens: int = 0
    """KV tokens that fit, each request with its predicted output; 0 = no bound."""
    step_s: float = inf
    """Longest time between tokens: `base_s + request_s · batch + token_s · kv_tokens` must not exceed it."""
    base_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0

    def exceeded(self, batch: int, kv_tokens: int, need_tokens: int) -> RefusalReason | None:
        """Which bound one more request breaks, beside those that decode; None when it fits."""
        if batch <= 0:
            return None
        if self.batch and batch + 1 > self.batch:
            return RefusalReason.TBT
        if self.step_s != inf:
            step_s = self.base_s + self.request_s * (batch + 1) + self.token_s * (kv_tokens + need_tokens)
            if step_s > self.step_s:
                return RefusalReason.TBT
        if self.kv_tokens and kv_tokens + need_tokens > self.kv_tokens:
            return RefusalReason.KV_MEMORY
        return None


class InstanceLoad(msgspec.Struct, frozen=True, gc=False):
    """Work promised to one instance and not yet finished, at one moment."""

    queued_s: float = 0.0
    """Predicted prefill seconds still ahead, handed over or not; the one that runs is counted down."""
    queued: int = 0
    """Prefills promised and not finished."""
    batch: int = 0
    """Requests in decode."""
    arriving: int = 0
    """Requests promised to this decode instance that do not decode yet: in prefill, or held."""
    kv_tokens: int = 0
    """KV tokens of the batch and of those arriving."""
    prefill_ends: Sequence[tuple[int, int, int]] = ()
    """(bucket, requests, KV tokens) of those arriving, by when their prefill is predicted to end."""
    decode_ends: Sequence[tuple[int, int, int]] = ()
    """(bucket, requests, KV tokens) of all promised here, by when their decode is predicted to end."""
    waiting: Sequence[Waiting] = ()
    """Of the prefills queued, those not yet handed to the instance, by when they were reserved."""
    queued_tokens: int = 0
    """Tokens that the queued prefills compute; one that runs counts whole until it ends."""

    @property
    def handed_over_s(self) -> float:
        """Of `queued_s`, what was handed to the instance and is still ahead."""
        waiting = self.waiting
        if not waiting:
            return self.queued_s
        return max(0.0, self.queued_s - sum([each.cost_us for each in waiting]) / 1e6)

    def has_room(self, ahead_s: float) -> bool:
        """Whether nobody waits there, and no more than so many seconds of prefill are ahead.

        While a prefill overruns its prediction nobody knows when the instance will be free: there is none.
        """
        return not self.queued or (not self.waiting and 0 < self.queued_s <= ahead_s)


class Ledger(Protocol):
    """Reservations of work in flight. `ConnectionError` where the shared state is away."""

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """Take the reservation if the limits hold now, in one atomic step; else say which one does not.

        `ttft` for the queue bound, `tbt` for the batch bound, `kv_memory` for the KV bound.
        """

    def waiting(self, reservation_id: str) -> Waiting | None:
        """What decides the turn of an own prefill; None when it does not wait for one."""

    async def move(self, reservation: Reservation, ahead_s: float, now_s: float) -> bool:
        """Let a prefill that waits for its turn wait at another instance, if nobody waits there: atomic.

        Args:
            reservation: As the one of the same id, but for its prefill, what that costs and when it ends.
            ahead_s: Most seconds of prefill still ahead there.
            now_s: The moment. The age by which it waits stays that of its reservation.

        Returns:
            Whether there was room; otherwise it waits on where it did. There is none where a prefill overruns
            its prediction: nobody knows when it will end.

        Raises:
            LookupError: no such reservation waits for its turn.
        """

    def prefill_begun(self, reservation_id: str, now_s: float) -> None:
        """The turn of a prefill that `waits` has come: it was handed to its instance. Idempotent."""

    def prefill_finished(self, reservation_id: str, now_s: float, *, held: bool = False) -> None:
        """The prefill ended: its seconds leave the queue, the request counts as decoding. Idempotent.

        Where it is `held` it counts as arriving until `seat` has given it a place.
        """

    async def seat(
        self, reservation_id: str, decode: str, limits: SeatLimits, now_s: float
    ) -> RefusalReason | None:
        """Give a request that waits a place at a decode instance, if the limits hold there now: atomic.

        The instance may be another one than was reserved. None where it decodes now; otherwise it waits on.

        Raises:
            LookupError: no such reservation waits.
        """

    def release(self, reservation_id: str, now_s: float) -> None:
        """The request ended in whichever way: all it held is free. Idempotent, never blocks, never lost.

        Where the shared state is away it is carried out on its return.
        """

    def loads(self, now_s: float) -> Mapping[str, InstanceLoad]:
        """Load by instance, from this process's mirror of the shared state (own changes included at once)."""

    def load(self, instance: str, now_s: float) -> InstanceLoad:
        """One instance's load, as in `loads`; an idle one's where nothing is promised to it."""

    async def refresh(self, now_s: float) -> None:
        """Heartbeat, read the shared state into the mirror, reap incarnations that died. Every ~50 ms."""

    async def close(self) -> None:
        """Give back every reservation of this incarnation and leave."""
