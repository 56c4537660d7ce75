from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from mooncake_operator.control.schedulers import Schedulers, SchedulersAwayError

TOKEN = "t"


class Admin(BaseHTTPRequestHandler):
    """An admin port with one instance."""

    def do_GET(self) -> None:
        view = {"id": "d-0", "role": "decode", "state": "draining", "load": {"batch": 0}}
        self._answer({"instances": [view], "degraded": []})

    def do_POST(self) -> None:
        self._answer({})

    def _answer(self, document: dict[str, Any]) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
        body = json.dumps(document).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def admin() -> Iterator[int]:
    """Its port, on 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def pod(name: str, address: str, *, ready: bool, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"mooncake.io/role": "scheduler"}, **metadata},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


async def test_a_scheduler_that_has_no_decode_instance_left_still_says_that_the_last_one_is_empty() -> None:
    with admin() as port:
        told = await Schedulers(port=port).view([pod("s", "127.0.0.1", ready=False)], TOKEN)

    assert told.registry is not None
    assert told.registry["d-0"].in_flight == 0


async def test_a_ready_scheduler_is_asked_before_one_that_is_not() -> None:
    with admin() as port:
        # Nothing listens at the other address: were it asked first, the time would be over.
        pods = [pod("a", "127.0.0.2", ready=False), pod("b", "127.0.0.1", ready=True)]
        assert (await Schedulers(port=port, timeout_s=1).view(pods, TOKEN)).registry is not None


async def test_a_scheduler_that_only_starts_is_no_silence() -> None:
    starting = pod("s", "127.0.0.2", ready=False)

    with admin() as port:
        told = await Schedulers(port=port).view([starting], TOKEN)

    assert (told.registry, told.silence) == (None, "")


async def test_without_a_scheduler_that_runs_nobody_takes_a_drain() -> None:
    ends = pod("s", "127.0.0.1", ready=True, deletionTimestamp="2026-01-01T00:00:00Z")

    with admin() as port, pytest.raises(SchedulersAwayError, match="none that runs"):
        await Schedulers(port=port).drain([ends], TOKEN, "d-0")
