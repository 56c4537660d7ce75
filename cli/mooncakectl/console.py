"""What every command says, and how: answers on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape

out = Console()
err = Console(stderr=True)


class CommandError(Exception):
    """Something the person at the terminal can put right; the message is what they read."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def in_seconds(value_s: float | None) -> str:
    """A time as people read it, to three digits; a dash where nothing was measured."""
    if value_s is None:
        return "–"
    if value_s < 1:
        return f"{value_s * 1000:.3g} ms"
    return f"{value_s:.3g} s" if value_s < 100 else f"{value_s:,.0f} s"


def report_error(message: str) -> None:
    """Print an error, on stderr and without wrapping: scripts may read it line by line."""
    err.print(f"[red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)


def say(message: str) -> None:
    """Print a remark on stderr."""
    err.print(escape(message), soft_wrap=True, highlight=False)


def print_json(document: Any) -> None:
    """Print a document on stdout as plain JSON, for programs."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()
