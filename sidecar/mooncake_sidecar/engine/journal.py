"""A file of what the sidecar knows, so that it can die at any moment and go on.

Records are framed by their length and a checksum and only ever appended, without waiting for the disk: the
file has to survive the process (kill -9), not the node, with which the engine's cache dies too. A torn or
broken tail is cut off. Now and then the file is replaced as a whole by an image of everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import TypeAlias
from zlib import crc32

import msgspec

from mooncake_sidecar.engine.mirror import Image, Step

_FRAME = Struct("<II")
_MAGIC = b"mooncake-journal-1\n"


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """The registry gave the instance an epoch."""

    epoch: int


class Message(msgspec.Struct, frozen=True, array_like=True, tag="message"):
    """A message of the engine was carried out."""

    sequence: int
    fingerprint: int
    version: int
    """Of the changes for the index, counted by the sidecar."""
    steps: tuple[Step, ...]


class Checked(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """What the store's master said changed what is known of the pool."""

    steps: tuple[Step, ...]


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """The engine lost its cache or began a new life, or messages were lost."""


class Everything(msgspec.Struct, frozen=True, array_like=True, tag="everything"):
    """All that is known at one moment."""

    epoch: int
    continues: bool
    """Whether the index holds what an earlier version of this was."""
    sequence: int
    fingerprint: int | None
    version: int
    image: Image


Entry: TypeAlias = Opened | Message | Checked | Forgotten | Everything

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Entry)


class Journal:
    """An append-only file in `folder`, for one instance.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, instance: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{instance}.journal"
        self._fresh_path = folder / f"{instance}.new"
        self._fresh_path.unlink(missing_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self.bytes = 0
        """Size of the file."""
        self.cut_bytes = 0
        """Bytes of a broken tail that `load` cut off."""

    def load(self) -> Iterator[Entry]:
        """Read all entries, oldest first, up to the first that is torn or broken; then cut off the rest.

        Raises:
            OSError: the disk is gone, or too full even for an empty journal: `replace` it before you append.
        """
        content = self._path.read_bytes()
        at = len(_MAGIC) if content.startswith(_MAGIC) else 0
        while at and at + _FRAME.size <= len(content):
            size, checksum = _FRAME.unpack_from(content, at)
            payload = content[at + _FRAME.size : at + _FRAME.size + size]
            if len(payload) < size or crc32(payload) != checksum:
                break
            try:
                entry = _decoder.decode(payload)
            except msgspec.DecodeError:
                break
            yield entry
            at += _FRAME.size + size
        self.cut_bytes = len(content) - at
        os.truncate(self._path, at)
        self.bytes = at
        if not at:
            self._append(_MAGIC)

    def append(self, entry: Entry) -> None:
        """Add an entry.

        Raises:
            OSError: the disk is full or gone. A part of the entry may have been written: `replace` before
                anything is appended again.
        """
        self._append(_frame(entry))

    def replace(self, everything: Everything) -> None:
        """Put one entry in the place of all.

        Raises:
            OSError: as `append`; the old file is still there.
        """
        content = _MAGIC + _frame(everything)
        try:
            self._fresh_path.write_bytes(content)
            fresh = self._fresh_path.open("ab", buffering=0)
            try:
                os.replace(self._fresh_path, self._path)
            except OSError:
                fresh.close()
                raise
        except OSError:
            # On a full disk what was written of it would only make things worse.
            self._fresh_path.unlink(missing_ok=True)
            raise
        self._file.close()
        self._file = fresh
        self.bytes = len(content)

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()

    def _append(self, content: bytes) -> None:
        written = self._file.write(content)
        if written != len(content):
            raise OSError(f"{self._path}: only {written} of {len(content)} bytes could be written")
        self.bytes += len(content)


def _frame(entry: Entry) -> bytes:
    payload = _encode(entry)
    return _FRAME.pack(len(payload), crc32(payload)) + payload
