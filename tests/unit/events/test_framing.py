import pytest

from mooncake_core.events import EventDecodeError
from mooncake_core.events.framing import (
    Message,
    parse_publication,
    parse_replay_answer,
    parse_replay_request,
    publication,
    replay_answer,
    replay_end,
    replay_request,
)


def test_a_publication_is_topic_big_endian_sequence_payload() -> None:
    message = Message(b"kv", 258, b"data")
    assert publication(message) == [b"kv", b"\0\0\0\0\0\0\1\2", b"data"]
    assert parse_publication(publication(message)) == message


def test_a_replay_request_names_the_first_sequence_wanted() -> None:
    assert replay_request(3) == [b"", b"\0" * 7 + b"\3"]
    assert parse_replay_request([b"client", *replay_request(3)]) == (b"client", 3)


@pytest.mark.parametrize("with_topic", [True, False])
def test_replay_answers_are_read_with_and_without_their_topic(with_topic: bool) -> None:
    message = Message(b"kv", 4, b"data")
    client, *answer = replay_answer(b"client", message, with_topic=with_topic)
    assert client == b"client"
    assert parse_replay_answer(answer) == (message if with_topic else message._replace(topic=b""))
    client, *end = replay_end(b"client", with_topic=with_topic)
    assert end[-2] == (-1).to_bytes(8, "big", signed=True)
    assert parse_replay_answer(end) is None


def test_broken_frames_are_refused() -> None:
    with pytest.raises(EventDecodeError, match="2 frames"):
        parse_publication([b"kv", b"\0" * 8])
    with pytest.raises(EventDecodeError, match="sequence frame of 3 bytes"):
        parse_publication([b"kv", b"abc", b""])
    with pytest.raises(EventDecodeError, match="replay answer"):
        parse_replay_answer([b"x", b"\0" * 8, b""])
    with pytest.raises(EventDecodeError, match="replay request"):
        parse_replay_request([b"x", b"y", b"\0" * 8])
