"""How far a replay is, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mooncakectl.console import err, say
from mooncakectl.replay.driver import Progress
from mooncakectl.replay.outcome import OutcomeKind

_LINE_EVERY_S: Final = 10.0


@contextmanager
def progress_shown(total: int) -> Iterator[Callable[[Progress], None]]:
    """Shows a replay's progress: a bar on a terminal, else a line now and then."""
    if not err.is_terminal:
        yield _line_now_and_then()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=err, refresh_per_second=4) as bars:
        task = bars.add_task("replay", total=total, told="")
        yield lambda progress: bars.update(task, completed=progress.done, told=_told(progress))


def _line_now_and_then() -> Callable[[Progress], None]:
    last_s = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _LINE_EVERY_S:
            last_s = now_s
            say(f"replay: {progress.done} of {progress.total} done, {_told(progress)}")

    return show


def _told(progress: Progress) -> str:
    counts = [
        f"{number} {kind.value}"
        for kind, number in progress.ended.items()
        if number and kind is not OutcomeKind.COMPLETED
    ]
    return ", ".join([f"{progress.sent - progress.done} under way", *counts])
