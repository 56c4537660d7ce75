"""KV events over real ZMQ: whoever follows them knows what the engine holds."""

import itertools
import random
from typing import Any

import pytest
import zmq

from mooncake_core.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from mooncake_core.events.framing import (
    Message,
    parse_publication,
    parse_replay_answer,
    replay_request,
)
from mooncake_testing.simulated import Simulated, SimulatedProcess


@pytest.fixture(scope="module")
def engine(simulated: Simulated) -> SimulatedProcess:
    return simulated.engine("--num-gpu-blocks-override", "40", events=True)


_fresh = itertools.count()


class Follower:
    """A subscriber that mirrors an engine's cache.

    Args:
        engine: whose events it follows.
        live: hear what is published from now on, with what came before already replayed; else only replay.
    """

    def __init__(self, engine: SimulatedProcess, *, live: bool = True) -> None:
        self._engine = engine
        self._context: zmq.Context[Any] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.connect(engine.replay_endpoint)
        self.held: set[Any] = set()
        self.sequences: list[int] = []
        self.kinds: list[type] = []
        if live:
            self._sub.connect(engine.events_endpoint)
            self._begin()

    def _begin(self) -> None:
        """Have the engine publish until something is heard: nothing else tells that one is subscribed."""
        while not self._sub.poll(50):
            ask(self._engine, [1_000 + next(_fresh)] * 40, output=1)
        first = parse_publication(self._sub.recv_multipart())
        for message in self.replay(0):
            if message.sequence < first.sequence:
                self.apply(message)
        self.apply(first)
        self.follow()

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        self._sub.close(0)
        self._dealer.close(0)
        self._context.term()

    def apply(self, message: Message) -> None:
        self.sequences.append(message.sequence)
        for event in decode_batch(message.payload).events:
            self.kinds.append(type(event))
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.hashes) * event.block_size
                self.held |= set(event.hashes)
            elif isinstance(event, BlockRemoved):
                self.held -= set(event.hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.held.clear()

    def follow(self) -> None:
        """Hear all that the engine has published so far; the last of it must not be one that it drops."""
        last = self._engine.get("/simulator/state")["next_event_sequence"] - 1
        while self.sequences[-1] < last:
            assert self._sub.poll(20_000), "the engine's events do not come"
            self.apply(parse_publication(self._sub.recv_multipart()))

    def replay(self, first: int) -> list[Message]:
        self._dealer.send_multipart(replay_request(first))
        messages = []
        while (message := parse_replay_answer(self._dealer.recv_multipart())) is not None:
            messages.append(message)
        return messages


def ask(engine: SimulatedProcess, prompt: list[int], output: int = 20) -> None:
    body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True}
    assert engine.post("/v1/completions", body).status_code == 200


def test_a_mirror_built_from_events_equals_the_cache_through_evictions_and_replays(
    engine: SimulatedProcess,
) -> None:
    chance = random.Random(4)
    with Follower(engine) as follower:
        for number in range(30):
            if number == 10:
                engine.post("/simulator/faults", {"drop_events": 3})
            ask(engine, [chance.randrange(3)] * chance.randrange(1, 200))
        follower.follow()
        missing = sorted(set(range(follower.sequences[-1])) - set(follower.sequences))
        assert len(missing) == 3
        replayed = Follower(engine, live=False)
        with replayed:
            for message in replayed.replay(0):
                replayed.apply(message)
            assert replayed.sequences == list(range(follower.sequences[-1] + 1))
            blocks = engine.get("/simulator/blocks")
            assert replayed.held == set(blocks["hashes"])
            assert BlockRemoved in replayed.kinds
        assert len(blocks["hashes"]) <= 39


def test_a_cleared_cache_is_told_with_the_next_step(engine: SimulatedProcess) -> None:
    with Follower(engine) as follower:
        engine.post("/reset_prefix_cache", {})
        assert engine.get("/simulator/blocks")["hashes"] == []
        before = len(follower.kinds)
        follower.follow()
        assert len(follower.kinds) == before
        ask(engine, [7] * 40, output=1)
        follower.follow()
        assert follower.kinds[before] is AllBlocksCleared
        assert follower.held == set(engine.get("/simulator/blocks")["hashes"])


def test_batches_lost_for_good_are_missing_in_the_replay_too(engine: SimulatedProcess) -> None:
    engine.post("/simulator/faults", {"lose_events": 1})
    next_sequence = engine.get("/simulator/state")["next_event_sequence"]
    ask(engine, [8] * 40, output=1)
    ask(engine, [9] * 40, output=1)
    with Follower(engine, live=False) as follower:
        assert [message.sequence for message in follower.replay(next_sequence)] == [next_sequence + 1]


def test_where_events_are_published_can_be_asked(engine: SimulatedProcess) -> None:
    source = engine.get("/kv_event_sources")["0"]
    assert source["endpoint"] == engine.events_endpoint
    assert source["replay_endpoint"] == engine.replay_endpoint
    assert source["topic"] == "kv-events"


def test_array_form_and_whole_hashes_are_spoken_on_request(simulated: Simulated) -> None:
    environ = {"MOONCAKE_SIMULATOR_ARRAY_EVENTS": "1", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    old = simulated.engine(events=True, environ=environ)
    with Follower(old) as follower:
        ask(old, [1] * 40, output=1)
        follower.follow()
        assert {name.hex() for name in follower.held} == set(old.get("/simulator/blocks")["hashes"])
        assert len(follower.held) >= 2
