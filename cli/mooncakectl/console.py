"""What every command says, and how: answers on stdout, everything else on stderr."""

from __future__ import annotations

import errno
import json
import os
import sys
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_UNBOUNDED: Final = 10_000


class _Console(Console):
    """A console whose reader may go."""

    def on_broken_pipe(self) -> None:
        """Remarks that nobody reads are left out; without a reader of answers there is no use in going on.

        Raises:
            BrokenPipeError: on stdout; not SystemExit, which would end a cluster without cleaning up.
        """
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        if not self.stderr:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _console(*, stderr: bool = False) -> Console:
    """A console that shows words as they are: names of files and models may look like markup.

    Where nobody looks on (a pipe, a file) nothing is cut to the width of a terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    seen = bool(os.environ.get("COLUMNS")) or (stream is not None and stream.isatty())
    return _Console(stderr=stderr, markup=False, emoji=False, width=None if seen else _UNBOUNDED)


out = _console()
err = _console(stderr=True)


class CommandError(Exception):
    """Something the person at the terminal can put right; the message is what they read."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def in_seconds(value_s: float | None) -> str:
    """A time as people read it, to three digits; a dash where nothing was measured."""
    if value_s is None:
        return "–"
    if value_s >= 100:
        return f"{value_s:,.0f} s"
    # Rounded first: 999.6 ms are 1 s, and not 1e+03 ms.
    rounded_s = round(value_s, 2 - floor(log10(value_s))) if value_s > 0 else 0.0
    return f"{rounded_s:.3g} s" if rounded_s >= 1 else f"{rounded_s * 1000:.3g} ms"


def check_writable(option: str, file: Path, *others: Path | None) -> None:
    """Before minutes are spent on what cannot be written, or must not be.

    Args:
        option: through which the file was named.
        file: what is to be written.
        others: what the same command reads, or writes too.

    Raises:
        CommandError: the message names the option, and what to do.
    """
    real = os.path.realpath(file)  # Path.resolve does not take links in a circle
    if os.path.islink(real):
        raise CommandError(f"{option} {file}: that link leads back to itself: name another file")
    twice = any(other is not None and real == os.path.realpath(other) for other in others)
    if twice and (file.is_file() or not file.exists()):  # devices may well have two uses
        raise CommandError(f"{option} {file}: this command has another use for that file: name another one")
    folder = file.absolute().parent
    if file.is_dir():
        raise CommandError(f"{option} {file}: that is a folder: name a file in it")
    if not folder.is_dir():
        raise CommandError(f"{option} {file}: there is no folder {file.parent}: make it first")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise CommandError(f"{option} {file}: you may not write there: name another file")


def write_file(file: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        OSError: with the file's name, also when it was the disk that had no room.
    """
    try:
        file.write_bytes(content)
    except OSError as error:
        error.filename = str(file)
        raise


def report_error(message: str) -> None:
    """Print an error, on stderr and without wrapping: scripts may read it line by line."""
    err.print(Text.assemble(("error:", "red"), " ", message), soft_wrap=True, highlight=False)


def say(message: str) -> None:
    """Print a remark on stderr."""
    err.print(message, soft_wrap=True, highlight=False)


def shown_progress(*columns: ProgressColumn) -> Progress:
    """How far a long work is, on stderr while it lasts; nothing where nobody looks on."""
    from rich.progress import Progress

    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def print_json(document: Any) -> None:
    """Print a document on stdout as plain JSON, for programs."""
    # The console's file is there even when stdout is closed.
    json.dump(document, out.file, indent=2)
    out.file.write("\n")
    out.file.flush()


def print_text(text: str) -> None:
    """Print a file's text on stdout as it is, to the last blank."""
    out.file.write(text)
    out.file.flush()
