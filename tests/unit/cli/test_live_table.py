"""The live table shares the terminal with what is printed beside it."""

from __future__ import annotations

import asyncio
import io
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from mooncakectl.local.runtime import PodStatus
from mooncakectl.session import Session
from mooncakectl.status import live

_CONTROL = re.compile(r"\x1b\[\??(\d*)([A-Za-z])|\r|\n|[^\x1b\r\n]+")


def screen(written: str) -> list[str]:
    """What a terminal shows, as far as lines, going up and erasing a line make it."""
    lines, at = [""], 0
    for part in _CONTROL.finditer(written):
        text, count, action = part[0], part[1], part[2]
        if text == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif action == "A":
            at = max(0, at - int(count or 1))
        elif action == "K":
            lines[at] = ""
        elif action is None and text != "\r":
            lines[at] += text
    return lines


class Pods:
    """Pods that get ready when they have been looked at a few times."""

    def __init__(self) -> None:
        self.looks = 0

    def statuses(self) -> list[PodStatus]:
        self.looks += 1
        return [PodStatus(f"pod-{number}", {}, self.looks > 2, 0, ()) for number in range(3)]


async def test_the_welcome_stays_on_the_terminal_and_no_table_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    # No terminal of this machine: others decide about colours and width by their environment.
    console = Console(file=terminal, force_terminal=True, width=100, height=40, color_system=None)
    monkeypatch.setattr(live, "err", console)
    monkeypatch.setattr(live, "_REFRESH_S", 0.01)
    pods = Pods()
    session = cast("Session", SimpleNamespace(runtime=pods, cluster=SimpleNamespace(admin_urls=())))

    def welcome() -> None:
        # Stdout: the same terminal, and nothing that rich knows of.
        terminal.write("ready http://here\ntry: this\n")

    async def shown() -> None:
        while pods.looks < 6:
            await asyncio.sleep(0.01)

    showing: asyncio.Task[Any] = asyncio.create_task(live.show_live(session, when_ready=welcome))
    await asyncio.wait_for(shown(), 20)
    lines = [line.rstrip() for line in screen(terminal.getvalue())]
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)
    assert lines[:2] == ["ready http://here", "try: this"]
    assert sum(line.startswith("INSTANCE") for line in lines) == 1
    left = [line.rstrip() for line in screen(terminal.getvalue())]
    assert [line for line in left if line] == ["ready http://here", "try: this"]
