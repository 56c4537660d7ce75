"""A proxy before a real API server that breaks what passes through it, on cue."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import aiohttp
from aiohttp import web

Fault = Callable[[web.Request], str | None]
"""Says what happens to a request: `404`, `500`, `429`, `gone`, `gone-status`, `error`, `drop`, or nothing."""


class KubeProxy:
    """Plain HTTP in, HTTPS out; runs in a thread of its own, so that tests may block."""

    def __init__(self, upstream: str, context: ssl.SSLContext) -> None:
        self._upstream = upstream
        self._context = context
        self._loop = asyncio.new_event_loop()
        self._started: Future[int] = Future()
        self._stop = asyncio.Event()
        self._watches: set[asyncio.Task[Any]] = set()
        self.fault: Fault = lambda request: None
        self._stalled: set[asyncio.Task[Any]] = set()
        self.lossy = threading.Event()
        """While set, events of watches are thrown away."""
        self.answers: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> str:
        """Returns the base URL."""
        self._thread.start()
        return f"http://127.0.0.1:{self._started.result(20)}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    @property
    def watches(self) -> int:
        """Watches that are open now."""
        return len(self._watches)

    def stall_watches(self) -> None:
        """Let the present watches deliver nothing any more, and keep their connections."""
        self._loop.call_soon_threadsafe(lambda: self._stalled.update(self._watches))

    def drop_watches(self) -> None:
        """Cut all watches off where they are."""

        def cut() -> None:
            for task in list(self._watches):
                task.cancel()

        self._loop.call_soon_threadsafe(cut)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()

    async def _serve(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            self._session = session
            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, shutdown_timeout=0.5)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._started.set_result(runner.addresses[0][1])
            await self._stop.wait()
            watches = list(self._watches)
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            # Whoever does not read, a stalled watch for instance, would never let an orderly close end.
            for connection in runner.server.connections if runner.server is not None else ():
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()
        # Transports close in the loop's next turns; one that outlives it fails whichever test runs then.
        await asyncio.sleep(0.5)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") in ("true", "1")
        wrong = self.fault(request)
        if wrong is not None:
            self.answers[wrong] += 1
            return await self._break(request, wrong)
        url, body = self._upstream + request.raw_path, await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "accept-encoding")}
        headers["Accept-Encoding"] = "identity"
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers, ssl=self._context
            ) as answer:
                if watch and answer.status == 200:
                    return await self._stream(request, answer)
                content = await answer.read()
                return web.Response(body=content, status=answer.status, content_type=answer.content_type)
        except aiohttp.ClientError:
            return web.Response(status=502, text="the API server is away")

    async def _break(self, request: web.Request, wrong: str) -> web.StreamResponse:
        if wrong == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if wrong in ("404", "500", "429", "gone-status"):
            code = 410 if wrong == "gone-status" else int(wrong)
            status = _status(code)
            return web.json_response(status, status=code, headers={"Retry-After": "1"} if code == 429 else {})
        event = {"type": "ERROR", "object": _status(410 if wrong == "gone" else 500)}
        return web.Response(text=json.dumps(event) + "\n", content_type="application/json")

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            async for line in answer.content:
                if task in self._stalled:
                    await asyncio.Event().wait()
                if not self.lossy.is_set():
                    await response.write(line)
        except (aiohttp.ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.close()
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.close()
            raise
        finally:
            self._watches.discard(task)
            self._stalled.discard(task)
        return response


def _status(code: int) -> dict[str, Any]:
    reason = {404: "NotFound", 410: "Expired", 429: "TooManyRequests", 500: "InternalError"}[code]
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": f"{reason}, on cue",
        "code": code,
    }
