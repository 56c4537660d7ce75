"""The ledger of a scheduler that is alone: no shared state, the same rules."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_core.ledger.book import IDLE, Book, Sum, exceeded
from mooncake_core.ledger.contract import InstanceLoad, Limits, RefusalReason, Reservation


class MemoryLedger:
    """Reservations of one process. Satisfies `Ledger`; never raises ConnectionError."""

    def __init__(self) -> None:
        self._book = Book()
        self._sums: dict[str, Sum] = {}

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        self._add_up()
        queue = self._sums.get(reservation.prefill or reservation.decode, IDLE)
        decode = self._sums.get(reservation.decode, IDLE)
        refused = exceeded(reservation, limits, queue, decode, now_s)
        if refused is None:
            self._book.add(reservation, now_s)
        return refused

    def prefill_finished(self, reservation_id: str, now_s: float) -> None:
        self._book.finish_prefill(reservation_id, now_s)

    def release(self, reservation_id: str, now_s: float) -> None:
        self._book.drop(reservation_id, now_s)

    def loads(self, now_s: float) -> Mapping[str, InstanceLoad]:
        self._add_up()
        return {instance: total.at(now_s) for instance, total in self._sums.items()}

    async def refresh(self, now_s: float) -> None:
        """Nothing is shared, so there is nothing to read."""

    async def close(self) -> None:
        self._book = Book()
        self._sums.clear()

    def _add_up(self) -> None:
        touched = self._book.touched
        for instance in touched:
            share = self._book.share(instance)
            if share is None:
                self._sums.pop(instance, None)
            else:
                self._sums[instance] = Sum((share,))
        touched.clear()
