"""An exactly-once, ordered stream out of messages that may be lost, replayed or come from a new life.

Pure: what arrives goes in, what to do comes out. ZMQ publishers number their messages from 0 in each life of
the engine, drop what a slow subscriber cannot take, and keep the last few thousand for replay. Sequence
numbers alone cannot tell two lives apart, so the tracker remembers a fingerprint of the last message it
applied and always asks for that message again: a replay that does not begin with it is of another life, or
no longer reaches back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

NOTHING: Final = -1
"""The last sequence of a stream of which nothing was applied yet."""


class ResyncReason(StrEnum):
    """Why what was applied before says nothing about the engine any more."""

    RESTARTED = "restarted"
    """The engine began a new life with an empty cache."""
    BUFFER_LOST = "buffer_lost"
    """Messages are missing that the engine's replay buffer no longer holds."""
    NO_REPLAY = "no_replay"
    """Messages are missing and the engine does not answer replays."""
    BEHIND = "behind"
    """More messages were waiting for a replay than may be kept."""


class Apply(NamedTuple):
    """Carry out this message; its sequence follows the one applied before."""

    sequence: int
    payload: bytes


class AskReplay(NamedTuple):
    """Ask the engine for every message from `first` on, on a fresh socket; answers carry `attempt`."""

    first: int
    attempt: int


class Resync(NamedTuple):
    """Forget what was applied (a new epoch); the stream goes on, in order, with what follows."""

    reason: ResyncReason


Effect: TypeAlias = Apply | AskReplay | Resync


class SequenceTracker:
    """One engine's event stream; every input returns the effects to carry out, in order.

    While a replay runs, live messages are held back: applied early, a store could revive a block whose
    removal is still being replayed.

    Args:
        last: the last sequence applied in an earlier life of this tracker (a journal), or `NOTHING`.
        fingerprint: that of the message `last` (see `fingerprint`); None skips the check of its content.
        can_replay: whether the engine has a replay endpoint.
        max_held: how many messages may wait for a replay.
    """

    def __init__(
        self,
        last: int = NOTHING,
        fingerprint: int | None = None,
        *,
        can_replay: bool = True,
        max_held: int = 20_000,
    ) -> None:
        self._last = last
        self._fingerprint = fingerprint
        self._can_replay = can_replay
        self._max_held = max_held
        self._attempt = 0
        self._replaying = False
        self._confirmed = True
        self._last_at_request = NOTHING
        self._gap_at_request = False
        self._live_high = NOTHING
        self._held: dict[int, bytes] = {}
        # Fingerprints of replayed messages that the live stream has not passed yet, in order: it may still
        # bring them a second time.
        self._echoes: dict[int, int] = {}

    @property
    def last(self) -> int:
        """The last sequence applied, `NOTHING` before the first."""
        return self._last

    @property
    def fingerprint(self) -> int | None:
        """Stands for the content of the last message applied; belongs into a journal beside `last`."""
        return self._fingerprint

    @property
    def replaying(self) -> bool:
        """Whether a replay was asked for and has not ended."""
        return self._replaying

    def connected(self) -> list[Effect]:
        """The subscription was made, or made again: messages of a new life may follow.

        Messages received over the connection before must have been given to `live` already.
        """
        self._drop_held()
        self._confirmed = self._last == NOTHING
        return [self._ask()] if self._can_replay else []

    def check(self) -> list[Effect]:
        """Make sure that no message was lost behind the last one; for now and then while nothing arrives."""
        return [self._ask()] if self._can_replay and not self._replaying else []

    def live(self, sequence: int, payload: bytes) -> list[Effect]:
        """A message from the subscription."""
        if sequence <= self._live_high or (sequence <= self._last and not self._is_echo(sequence, payload)):
            # A publisher never repeats itself: a number from the past is that of a new life.
            return self._restart_with(sequence, payload)
        self._live_high = sequence
        self._forget_echoes(sequence)
        if sequence <= self._last:
            return []
        if self._replaying:
            return self._hold(sequence, payload)
        if self._confirmed and sequence == self._last + 1:
            return [self._apply(sequence, payload)]
        self._held[sequence] = payload
        if not self._can_replay:
            return self._skip_to_held(ResyncReason.NO_REPLAY)
        return [self._ask()]

    def replayed(self, attempt: int, sequence: int, payload: bytes) -> list[Effect]:
        """A message of the replay `attempt`; those of abandoned attempts are ignored."""
        if not self._replaying or attempt != self._attempt or sequence < self._last:
            return []
        effects: list[Effect] = []
        if sequence == self._last:
            if self._confirmed or self._fingerprint in (None, xxh3_64_intdigest(payload)):
                self._confirmed = True
                return []
            return self._restart()
        if not self._confirmed:
            effects.append(Resync(ResyncReason.BUFFER_LOST))
            self._forget(sequence - 1)
        held = self._held.get(sequence)
        if held is not None and held != payload:
            self._drop_held()
            return effects + self._restart()
        if sequence > self._last + 1:
            # A hole inside the replay; asked for again when it ends.
            return effects + self._hold(sequence, payload)
        self._held.pop(sequence, None)
        effects.append(self._apply(sequence, payload))
        if sequence > self._live_high:
            self._echoes[sequence] = xxh3_64_intdigest(payload)
        return effects

    def replay_ended(self, attempt: int) -> list[Effect]:
        """The replay `attempt` is complete."""
        if not self._replaying or attempt != self._attempt:
            return []
        self._replaying = False
        if not self._confirmed:
            # Not even the last message applied is there: this life is younger than it.
            return self._restart()
        advanced = self._last > self._last_at_request
        effects = list(self._drain())
        if not self._held:
            return effects
        if advanced or effects or not self._gap_at_request:
            return [*effects, self._ask()]
        # The engine knew what was wanted and had none of it.
        return self._skip_to_held(ResyncReason.BUFFER_LOST)

    def replay_failed(self, attempt: int) -> list[Effect]:
        """The replay `attempt` was refused or did not end in time."""
        if not self._replaying or attempt != self._attempt:
            return []
        self._replaying = False
        effects = list(self._drain()) if self._confirmed else []
        return effects + self._skip_to_held(ResyncReason.NO_REPLAY)

    def _ask(self) -> AskReplay:
        self._attempt += 1
        self._replaying = True
        self._confirmed = self._last == NOTHING
        self._last_at_request = self._last
        self._gap_at_request = bool(self._held)
        return AskReplay(max(self._last, 0), self._attempt)

    def _apply(self, sequence: int, payload: bytes) -> Apply:
        self._last = sequence
        self._fingerprint = xxh3_64_intdigest(payload)
        return Apply(sequence, payload)

    def _hold(self, sequence: int, payload: bytes) -> list[Effect]:
        self._held[sequence] = payload
        if len(self._held) <= self._max_held:
            return []
        self._replaying = False
        return self._skip_to_held(ResyncReason.BEHIND)

    def _drain(self) -> Iterator[Effect]:
        """Apply what was held back and now follows; what is older is a repetition."""
        for sequence in sorted(self._held):
            if sequence <= self._last:
                del self._held[sequence]
            elif sequence == self._last + 1:
                yield self._apply(sequence, self._held.pop(sequence))
            else:
                return

    def _skip_to_held(self, reason: ResyncReason) -> list[Effect]:
        """Give up the missing messages and go on with the oldest one in hand."""
        effects: list[Effect] = []
        while self._held:
            effects.append(Resync(reason))
            self._forget(min(self._held) - 1)
            effects.extend(self._drain())
            if self._held and self._can_replay and reason is not ResyncReason.NO_REPLAY:
                return [*effects, self._ask()]
        return effects

    def _restart(self) -> list[Effect]:
        """Begin with a new life of the engine; what is held came over its connection and stays."""
        self._forget(NOTHING)
        effects: list[Effect] = [Resync(ResyncReason.RESTARTED)]
        return [*effects, self._ask()] if self._can_replay else effects

    def _restart_with(self, sequence: int, payload: bytes) -> list[Effect]:
        """Begin with a new life that showed itself by a live message: nothing in hand before it counts."""
        self._drop_held()
        self._forget(NOTHING)
        self._replaying = False
        return [Resync(ResyncReason.RESTARTED), *self.live(sequence, payload)]

    def _drop_held(self) -> None:
        self._held.clear()
        self._live_high = NOTHING

    def _forget(self, last: int) -> None:
        self._last = last
        self._fingerprint = None
        self._confirmed = True
        self._echoes.clear()

    def _is_echo(self, sequence: int, payload: bytes) -> bool:
        return self._echoes.get(sequence) == xxh3_64_intdigest(payload)

    def _forget_echoes(self, sequence: int) -> None:
        while self._echoes:
            oldest = next(iter(self._echoes))
            if oldest > sequence:
                return
            del self._echoes[oldest]


fingerprint: Callable[[bytes], int] = xxh3_64_intdigest
"""What stands for a message's content in `SequenceTracker` and in a journal."""
