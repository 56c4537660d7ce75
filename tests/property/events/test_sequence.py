"""The tracker against a model engine: lives, a bounded replay buffer, and a network that loses messages."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.events import Apply, AskReplay, Effect, Resync, SequenceTracker
from mooncake_core.events.sequence import NOTHING, ResyncReason, fingerprint


class World:
    """One engine, its subscriber, and what lies between them."""

    def __init__(self, buffer: int, *, can_replay: bool = True, max_held: int = 20_000) -> None:
        self.buffer = buffer
        self.life = 0
        self.published: list[bytes] = []
        self.wire: deque[tuple[int, bytes]] = deque()
        self.asked: AskReplay | None = None
        self.answers: deque[tuple[int, int, bytes] | int] = deque()
        self.tracker = SequenceTracker(can_replay=can_replay, max_held=max_held)
        self.applied: list[tuple[int, int]] = []
        self.resyncs: list[ResyncReason] = []
        self.fresh = True
        self.carry_out(self.tracker.connected())

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                life, sequence = map(int, effect.payload.split(b":"))
                assert sequence == effect.sequence
                if self.fresh:
                    # Without a resync before it, a stream begins at the beginning.
                    assert self.resyncs or sequence == 0
                else:
                    assert (life, sequence) == (self.applied[-1][0], self.applied[-1][1] + 1)
                self.fresh = False
                self.applied.append((life, sequence))
            elif isinstance(effect, Resync):
                self.fresh = True
                self.resyncs.append(effect.reason)
            else:
                self.asked = effect

    def publish(self) -> None:
        sequence = len(self.published)
        self.published.append(b"%d:%d" % (self.life, sequence))
        self.wire.append((sequence, self.published[-1]))

    def deliver(self) -> None:
        if self.wire:
            self.carry_out(self.tracker.live(*self.wire.popleft()))

    def drop(self) -> None:
        if self.wire:
            self.wire.popleft()

    def serve(self) -> None:
        """The engine takes the request and answers with what its buffer holds now."""
        if self.asked is None:
            return
        asked, self.asked = self.asked, None
        oldest = max(0, len(self.published) - self.buffer)
        for sequence in range(max(asked.first, oldest), len(self.published)):
            self.answers.append((asked.attempt, sequence, self.published[sequence]))
        self.answers.append(asked.attempt)

    def answer(self) -> None:
        if not self.answers:
            return
        answer = self.answers.popleft()
        if isinstance(answer, int):
            self.carry_out(self.tracker.replay_ended(answer))
        else:
            self.carry_out(self.tracker.replayed(*answer))

    def drop_answer(self) -> None:
        if self.answers and not isinstance(self.answers[0], int):
            self.answers.popleft()

    def fail(self) -> None:
        attempt = self.asked.attempt if self.asked else None
        if attempt is None and self.answers:
            last = self.answers[-1]
            attempt = last if isinstance(last, int) else last[0]
            self.answers.clear()
        self.asked = None
        if attempt is not None:
            self.carry_out(self.tracker.replay_failed(attempt))

    def restart(self) -> None:
        """A new life. What the old connection had not delivered is gone; stale answers may still come."""
        self.life += 1
        self.published = []
        self.wire.clear()
        self.carry_out(self.tracker.connected())

    def reconnect(self) -> None:
        self.wire.clear()
        self.carry_out(self.tracker.connected())

    def check(self) -> None:
        self.carry_out(self.tracker.check())

    def settle(self) -> None:
        for _ in range(10_000):
            if self.wire:
                self.deliver()
            elif self.answers:
                self.answer()
            elif self.asked:
                self.serve()
            else:
                return
        raise AssertionError("replays never come to an end")


STEPS = (
    "publish", "publish", "publish", "deliver", "deliver", "deliver", "drop", "serve", "serve", "answer",
    "answer", "answer", "drop_answer", "fail", "restart", "reconnect", "check",
)  # fmt: skip
steps = st.lists(st.sampled_from(STEPS), max_size=120)


@settings(max_examples=400)
@given(steps, st.integers(0, 12), st.booleans(), st.sampled_from([2, 20_000]))
def test_messages_are_applied_once_and_in_order_or_a_resync_is_declared(
    steps: list[str], buffer: int, can_replay: bool, max_held: int
) -> None:
    world = World(buffer, can_replay=can_replay, max_held=max_held)
    for step in steps:
        getattr(world, step)()
    world.settle()
    world.publish()
    world.settle()
    assert world.applied[-1] == (world.life, len(world.published) - 1)
    assert not world.tracker.replaying
    assert world.tracker.last == len(world.published) - 1


@given(st.lists(st.sampled_from(["publish", "publish", "deliver", "drop", "serve", "answer", "check"])))
def test_losses_that_the_buffer_covers_never_cost_a_resync(steps: list[str]) -> None:
    world = World(buffer=1000)
    for step in steps:
        getattr(world, step)()
    world.publish()
    world.settle()
    assert world.resyncs == []
    assert [sequence for _, sequence in world.applied] == list(range(len(world.published)))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_journal_goes_on_where_it_ended_if_the_life_is_the_same(
    before: int, missed: int, after: int
) -> None:
    messages = [b"0:%d" % n for n in range(before + missed + after)]
    last = before - 1
    mark = fingerprint(messages[last]) if before else None
    tracker = SequenceTracker(last, mark)
    (ask,) = tracker.connected()
    assert isinstance(ask, AskReplay)
    assert ask.first == max(last, 0)
    effects = [
        effect
        for sequence in range(ask.first, before + missed)
        for effect in tracker.replayed(ask.attempt, sequence, messages[sequence])
    ]
    effects += tracker.replay_ended(ask.attempt)
    for sequence in range(before + missed, len(messages)):
        effects += tracker.live(sequence, messages[sequence])
    assert effects == [Apply(n, messages[n]) for n in range(before, len(messages))]


def test_an_engine_that_restarted_while_nobody_watched_is_noticed_even_at_the_same_sequence() -> None:
    tracker = SequenceTracker(2, fingerprint(b"0:2"))
    (ask,) = tracker.connected()
    assert isinstance(ask, AskReplay)
    resync, again = tracker.replayed(ask.attempt, 2, b"1:2")
    assert resync == Resync(ResyncReason.RESTARTED)
    assert isinstance(again, AskReplay)
    assert again.first == 0
    assert tracker.replayed(ask.attempt, 3, b"1:3") == []  # an answer to the abandoned question


def test_an_idle_engine_of_a_shorter_life_is_noticed() -> None:
    tracker = SequenceTracker(7, fingerprint(b"0:7"))
    (ask,) = tracker.connected()
    assert isinstance(ask, AskReplay)
    assert tracker.replay_ended(ask.attempt)[0] == Resync(ResyncReason.RESTARTED)


def test_sequence_zero_again_is_a_new_life() -> None:
    tracker = SequenceTracker()
    assert tracker.live(0, b"a") == [Apply(0, b"a")]
    assert tracker.live(1, b"b") == [Apply(1, b"b")]
    assert tracker.live(0, b"c") == [Resync(ResyncReason.RESTARTED), Apply(0, b"c")]


def test_without_a_replay_endpoint_a_gap_is_a_resync_at_once() -> None:
    tracker = SequenceTracker(can_replay=False)
    assert tracker.connected() == []
    assert tracker.live(0, b"a") == [Apply(0, b"a")]
    assert tracker.live(2, b"c") == [Resync(ResyncReason.NO_REPLAY), Apply(2, b"c")]
    assert tracker.last == 2


def test_the_first_message_above_zero_asks_for_the_beginning() -> None:
    tracker = SequenceTracker()
    (ask,) = tracker.live(5, b"f")
    assert ask == AskReplay(0, 1)
    assert tracker.last == NOTHING
