"""Prefilled requests that wait for a place to decode, by the Conductor's own rules (`conductor.holding`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake_core.ledger import InstanceLoad
from mooncake_core.ledger.board import Board
from mooncake_core.registry import Instance
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.holding import Held
from mooncake_scheduler.conductor.model import InstanceView
from mooncake_simulator.cluster.agenda import Agenda

NO_PLACE = "no_place"
"""Why a request was refused after its prefill: there was no place to decode while its TTFT budget lasted."""


class Holding:
    """The line before all decode instances.

    Args:
        agenda: the time.
        conductor: says who gets a place.
        board: what decodes where.
        decode: the instances.
    """

    def __init__(
        self, agenda: Agenda, conductor: Conductor, board: Board, decode: Sequence[Instance]
    ) -> None:
        self._agenda = agenda
        self._conductor = conductor
        self._board = board
        self._decode = decode
        self._line = conductor.line()
        self._ways: dict[str, tuple[Callable[[Instance], None], Callable[[], None]]] = {}
        self.most_kv_tokens = 0
        """The most KV that ever lay staged for those who wait."""

    def join(self, held: Held, seated: Callable[[Instance], None], given_up: Callable[[], None]) -> None:
        """Get in line; the reservation waits on the board.

        Args:
            held: the request.
            seated: called with the instance once there is a place, maybe at once.
            given_up: called when its time is over.
        """
        self._line.join(held)
        self._ways[held.ask.id] = seated, given_up
        self.look()
        if held.ask.id in self._line:
            self.most_kv_tokens = max(self.most_kv_tokens, self._line.kv_tokens)
            self._agenda.at(held.until_s, self._give_up, held)

    def leave(self, request: str) -> None:
        """Out of the line: its instance died."""
        if self._line.leave(request) is not None:
            del self._ways[request]

    def look(self) -> None:
        """Give the places that are free now away; to be called when one has become free."""
        if not self._line:
            return
        now_s, board = self._agenda.now_s, self._board
        views = [InstanceView(instance, self._load(instance.id)) for instance in self._decode]
        for held, decode in self._line.seats(now_s, views, self._conductor.costs):
            limits = self._conductor.seat_limits(held.slo, decode)
            need_tokens = board.held(held.ask.id).reservation.kv_tokens
            assert board.seat_exceeded(need_tokens, decode.id, limits) is None, (
                "the line and the ledger agree"
            )
            board.book.seat(held.ask.id, decode.id, now_s)
            self._line.leave(held.ask.id)
            self._conductor.observe_place(held, now_s, found=True)
            self._ways.pop(held.ask.id)[0](decode)

    def _load(self, instance: str) -> InstanceLoad:
        return self._board.load(instance, self._agenda.now_s)

    def _give_up(self, held: Held) -> None:
        if self._line.leave(held.ask.id) is not None:
            self._conductor.observe_place(held, self._agenda.now_s, found=False)
            self._ways.pop(held.ask.id)[1]()
            self.look()
