"""What a server prints is no reason to end: lines that cannot be written are lost, and told of afterwards.

A log disk that is full, a limit on a file's size, a pipe that nobody reads: each makes a write raise, and
structlog, `print` and Python's own flush at the end of a process pass that on. A server that ended for it
would be started again, and end again, for as long as the disk is full.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import sys
from typing import Any, TextIO

_NEWLINE = ord("\n")


def lose_what_cannot_be_written() -> None:
    """Make standard output and standard error of this process take everything; see `LossyFile`.

    To be called before anything keeps a reference to them, as loggers do.
    """
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO | None) -> TextIO:
    if stream is None:  # The process was started with it closed.
        return open(os.devnull, "w")
    stream.flush()
    buffer = io.BufferedWriter(LossyFile(stream.fileno()))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)


class LossyFile(io.RawIOBase):
    """An open file to which every write succeeds; what the system does not take of it is lost.

    The first line that it takes afterwards follows one of JSON that says how many were lost, and why.
    """

    def __init__(self, descriptor: int) -> None:
        """Write to a descriptor, which stays open."""
        self._descriptor = descriptor
        self._lost_lines = 0
        self._why = ""
        self._is_within_line = False

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Write all of it, bytes or what shows as such, or lose the rest."""
        lines = bytes(data)
        if self._lost_lines and self._put(self._notice()):
            self._lost_lines += _count(lines)
        else:
            self._lost_lines = self._put(lines)
        return len(lines)

    def _put(self, lines: bytes) -> int:
        """Write them; returns how many were lost."""
        rest = memoryview(lines)
        try:
            while rest:
                written = os.write(self._descriptor, rest)
                self._is_within_line = rest[written - 1] != _NEWLINE
                rest = rest[written:]
        except OSError as error:
            self._why = error.strerror or str(error)
            return _count(bytes(rest))
        return 0

    def _notice(self) -> bytes:
        told = {
            "event": "lines of this log were lost",
            "level": "warning",
            "lines": self._lost_lines,
            "why": self._why,
            "timestamp": dt.datetime.now(dt.UTC).isoformat(),
        }
        return (b"\n" if self._is_within_line else b"") + json.dumps(told).encode() + b"\n"


def _count(lines: bytes) -> int:
    # What has no end of its own is the rest of a line, or the begin of one.
    return max(1, lines.count(b"\n"))
