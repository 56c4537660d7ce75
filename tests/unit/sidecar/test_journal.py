"""The journal survives what the process does not."""

import resource
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mooncake_core.events import BlockStored, EventBatch, encode_batch
from mooncake_sidecar.engine.journal import Everything, Forgotten, Journal, Message, Opened
from mooncake_sidecar.engine.mirror import Clear, Drop, Image, Put
from mooncake_sidecar.engine.residency import Residency

ENTRIES = [
    Opened(3),
    Message(0, 2**64 - 1, 1, (Put(1, False, 7, 0, (b"\x01" * 32, 5), (2**64 - 1, 0)), Drop(1, True, (5,)))),
    Forgotten(),
    Message(1, 0, 1, (Clear(),)),
    Everything(3, True, 1, None, 1, Image([b"a", 5], [1, 2], [3, 3], [0, 1], [1, 1], [0, 2], [0, 0])),
]


def written(folder: Path) -> Path:
    journal = Journal(folder, "a")
    assert list(journal.load()) == []
    for entry in ENTRIES:
        journal.append(entry)
    journal.close()
    return folder / "a.journal"


def load(folder: Path) -> tuple[list[object], int]:
    journal = Journal(folder, "a")
    entries: list[object] = list(journal.load())
    journal.close()
    return entries, journal.cut_bytes


def test_what_was_appended_is_loaded(tmp_path: Path) -> None:
    written(tmp_path)
    assert load(tmp_path) == (ENTRIES, 0)


@pytest.mark.parametrize("cut", [1, 5, 8, 9, 40])
def test_a_torn_tail_is_cut_off_and_writing_goes_on_behind_what_is_whole(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-cut])
    entries, cut_bytes = load(tmp_path)
    assert entries == ENTRIES[: len(entries)]
    assert len(entries) < len(ENTRIES)
    assert cut_bytes
    journal = Journal(tmp_path, "a")
    list(journal.load())
    journal.append(Opened(9))
    journal.close()
    assert load(tmp_path) == ([*entries, Opened(9)], 0)


def test_nothing_behind_a_broken_entry_is_believed(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    entries, _ = load(tmp_path)
    assert entries == ENTRIES[: len(entries)]
    assert len(entries) < 2


@pytest.mark.parametrize("content", [b"", b"moon", b"something else entirely\n", b"\0" * 100])
def test_a_file_that_is_no_journal_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.journal").write_bytes(content)
    journal = Journal(tmp_path, "a")
    assert list(journal.load()) == []
    journal.append(Opened(1))
    journal.close()
    assert load(tmp_path)[0] == [Opened(1)]


def test_replacing_leaves_one_entry_and_can_be_appended_to(tmp_path: Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path, "a")
    list(journal.load())
    everything = ENTRIES[-1]
    assert isinstance(everything, Everything)
    journal.replace(everything)
    journal.append(Opened(4))
    journal.close()
    assert load(tmp_path)[0] == [everything, Opened(4)]


def test_instances_have_journals_of_their_own(tmp_path: Path) -> None:
    written(tmp_path)
    other = Journal(tmp_path, "b")
    assert list(other.load()) == []
    other.close()


@contextmanager
def no_room_beyond(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes: the kernel refuses, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        with capture_logs():  # pytest keeps what is printed in a file
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def stored(number: int) -> bytes:
    tokens = array("I", range(number * 16, number * 16 + 16))
    event = BlockStored(hashes=(number,), parent=None, token_ids=tokens, block_size=16)
    return encode_batch(EventBatch(ts=0.0, events=(event,)))


def test_on_a_full_disk_the_mirror_goes_on_and_the_journal_is_whole_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = Residency(tmp_path, "a", has_pool=False)
    residency.begin_epoch(4)
    with no_room_beyond(400):
        for number in range(100):
            residency.message(number, stored(number))
    assert len(residency.mirror) == 100
    assert 1 <= residency.journal_errors <= 2, "each attempt costs an image of everything"
    assert [file.name for file in tmp_path.iterdir()] == ["a.journal"], "a part of an image was left"

    monkeypatch.setattr("mooncake_sidecar.engine.residency.REPAIR_EVERY_S", 0.0)
    residency._repair_at_s = 0.0
    with no_room_beyond(400):
        residency.message(100, stored(100))
    residency.message(101, stored(101))
    residency.close()
    successor = Residency(tmp_path, "a", has_pool=False)
    assert (successor.epoch, successor.sequence, len(successor.mirror)) == (4, 101, 102)
    successor.close()


def test_a_sidecar_begins_on_a_full_disk_too(tmp_path: Path) -> None:
    with no_room_beyond(4):
        residency = Residency(tmp_path, "a", has_pool=False)
        residency.begin_epoch(4)
        residency.message(0, stored(0))
    assert len(residency.mirror) == 1
    residency.close()
    assert load(tmp_path)[0] == []


def test_what_a_life_that_was_killed_had_begun_to_write_is_taken_away(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "a.new").write_bytes(b"half an image")
    assert load(tmp_path) == (ENTRIES, 0)
    assert [file.name for file in tmp_path.iterdir()] == ["a.journal"]
