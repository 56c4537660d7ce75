"""The ledger of a scheduler that is alone: no shared state, the same rules."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake_core.ledger.board import Board
from mooncake_core.ledger.contract import InstanceLoad, Limits, RefusalReason, Reservation, SeatLimits
from mooncake_core.ledger.share import Waiting


class MemoryLedger:
    """Reservations of one process. Satisfies `Ledger`; never raises ConnectionError."""

    def __init__(self) -> None:
        self._board = Board()

    async def reserve(self, reservation: Reservation, limits: Limits, now_s: float) -> RefusalReason | None:
        """As the contract says.

        Raises:
            ValueError: the id is held already.
        """
        refused = self._board.exceeded(reservation, limits, now_s)
        if refused is None:
            waits = self._board.has_to_wait(reservation, now_s)
            self._board.book.add(reservation, now_s, waits=waits)
        return refused

    def waiting(self, reservation_id: str) -> Waiting | None:
        return self._board.book.waiting(reservation_id)

    async def move(self, reservation: Reservation, ahead_s: float, now_s: float) -> bool:
        self._board.in_line(reservation.id)
        room = self._board.load(reservation.prefill or reservation.decode, now_s).has_room(ahead_s)
        if room:
            self._board.book.move(reservation)
        return room

    def prefill_begun(self, reservation_id: str, now_s: float) -> None:
        self._board.begin_prefill(reservation_id, now_s)

    def prefill_finished(self, reservation_id: str, now_s: float, *, held: bool = False) -> None:
        self._board.finish_prefill(reservation_id, now_s, held=held)

    async def seat(
        self, reservation_id: str, decode: str, limits: SeatLimits, now_s: float
    ) -> RefusalReason | None:
        entry = self._board.held(reservation_id)
        refused = self._board.seat_exceeded(entry.reservation.kv_tokens, decode, limits)
        if refused is None:
            self._board.book.seat(reservation_id, decode, now_s)
        return refused

    def release(self, reservation_id: str, now_s: float) -> None:
        self._board.drop(reservation_id, now_s)

    def loads(self, now_s: float) -> Mapping[str, InstanceLoad]:
        return self._board.loads(now_s)

    def load(self, instance: str, now_s: float) -> InstanceLoad:
        return self._board.load(instance, now_s)

    async def refresh(self, now_s: float) -> None:
        """Nothing is shared, so there is nothing to read."""

    async def close(self) -> None:
        self._board = Board()
