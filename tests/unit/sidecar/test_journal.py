"""The journal survives what the process does not."""

from pathlib import Path

import pytest

from mooncake_sidecar.engine.journal import Everything, Forgotten, Journal, Message, Opened
from mooncake_sidecar.engine.mirror import Clear, Drop, Image, Put

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
