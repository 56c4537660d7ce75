"""The ZMQ frames around KV events: publishing and replay.

Published: `topic | sequence (8 bytes, big-endian) | payload`; sequences count from 0 in each life of an
engine.
Replay: a DEALER sends `"" | first sequence`; the ROUTER answers with one message a batch,
`"" | topic | sequence | payload`, and ends with the sequence -1. vLLM before 0.28 leaves the topic out.

Source: vLLM `distributed/kv_events.py` (ZmqEventPublisher); vllm-project/vllm issue 45174 for the topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from mooncake_core.events.decode import EventDecodeError

_SEQUENCE: Final = Struct(">Q")
_END: Final = b"\xff" * 8


class Message(NamedTuple):
    """One published batch, not yet decoded."""

    topic: bytes
    sequence: int
    payload: bytes


def publication(message: Message) -> list[bytes]:
    """Frames for the PUB socket."""
    return [message.topic, _SEQUENCE.pack(message.sequence), message.payload]


def parse_publication(frames: Sequence[bytes]) -> Message:
    """A message as a SUB socket received it.

    Raises:
        EventDecodeError: the frames are not those of a publication.
    """
    if len(frames) != 3:
        raise EventDecodeError(f"publication of {len(frames)} frames: expected topic, sequence, payload")
    return Message(frames[0], _sequence(frames[1]), frames[2])


def replay_request(first: int) -> list[bytes]:
    """Frames for the DEALER socket: ask for every batch from `first` on."""
    return [b"", _SEQUENCE.pack(first)]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int]:
    """A request as the ROUTER received it: who asks, and the first sequence wanted.

    Raises:
        EventDecodeError: the frames are not those of a request.
    """
    if len(frames) != 3 or frames[1]:
        raise EventDecodeError(f"replay request of {len(frames)} frames: expected identity, empty, sequence")
    return frames[0], _sequence(frames[2])


def replay_answer(client: bytes, message: Message, *, with_topic: bool = True) -> list[bytes]:
    """Frames for the ROUTER socket: one batch for `client`."""
    head = [client, b"", message.topic] if with_topic else [client, b""]
    return [*head, _SEQUENCE.pack(message.sequence), message.payload]


def replay_end(client: bytes, *, topic: bytes = b"", with_topic: bool = True) -> list[bytes]:
    """Frames for the ROUTER socket: nothing more to replay."""
    head = [client, b"", topic] if with_topic else [client, b""]
    return [*head, _END, b""]


def parse_replay_answer(frames: Sequence[bytes]) -> Message | None:
    """An answer as the DEALER received it; None marks the end.

    Raises:
        EventDecodeError: the frames are not those of an answer.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise EventDecodeError(
            f"replay answer of {len(frames)} frames: expected empty, (topic), sequence, payload"
        )
    topic = frames[1] if len(frames) == 4 else b""
    if frames[-2] == _END:
        return None
    return Message(topic, _sequence(frames[-2]), frames[-1])


def _sequence(frame: bytes) -> int:
    if len(frame) != _SEQUENCE.size:
        raise EventDecodeError(f"sequence frame of {len(frame)} bytes: expected {_SEQUENCE.size}")
    value: int = _SEQUENCE.unpack(frame)[0]
    return value
