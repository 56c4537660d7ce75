"""`python -m mooncake_simulator.engine <vLLM's flags> --profile NAME --time-scale X`.

With `--nnodes N` it is one of N processes that are one engine: rank 0 serves, the others are `--headless`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import uvloop

from mooncake_core.open_files import allow_many_open_files
from mooncake_core.standard_streams import lose_what_cannot_be_written
from mooncake_simulator.engine.app import App
from mooncake_simulator.engine.assembly import build
from mooncake_simulator.engine.core import Engine
from mooncake_simulator.engine.group import GroupError, Leader, shape, work
from mooncake_simulator.engine.http_server import HttpServer
from mooncake_simulator.engine.options import EngineOptions, OptionsError, parse
from mooncake_simulator.engine.tokens import codec_for

LOG = logging.getLogger("mooncake_simulator.engine")

_POLL_S = 0.05
_LAST_WORDS_S = 0.2
"""How long connections get to take their last bytes."""


async def serve(options: EngineOptions) -> None:
    """Run one engine until it is told to end.

    Raises:
        OSError: an address is in use.
    """
    stop = _told_to_stop()
    try:
        engine = build(options)
    except OptionsError as error:
        sys.exit(f"mooncake_simulator.engine: {error}")
    app = App(engine, codec_for(options.model))
    server = HttpServer(app)
    leader = Leader(options, engine.die)
    if options.group.nodes > 1:
        # vLLM opens its port when the engine is there, too: until then nobody can ask for its health.
        await _first(leader.gather(), stop.wait())
        if stop.is_set():
            await leader.close()
            return
    await engine.start()
    port = await server.start(options.host, options.port)
    LOG.info("serving %s on http://%s:%d", ", ".join(options.served_model_names), options.host, port)
    await stop.wait()
    await _drain(engine, app)
    await asyncio.sleep(_LAST_WORDS_S)
    await server.stop()
    await engine.stop()
    await leader.close()


async def be_worker(options: EngineOptions) -> None:
    """Compute for a leader until it ends, or this process is told to.

    Raises:
        GroupError: the leader refuses, or is lost.
    """
    stop = _told_to_stop()
    await _first(work(options.group, shape(options)), stop.wait())


def _told_to_stop() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    """Wait for the first of these and cancel the others; what went wrong in it is raised."""
    tasks = [asyncio.create_task(each) for each in works]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    for task in done:
        task.result()


async def _drain(engine: Engine, app: App) -> None:
    """As vLLM on SIGTERM: within --shutdown-timeout what runs may end; what is left is aborted."""
    app.draining = True
    scheduler = engine.scheduler
    deadline = asyncio.get_running_loop().time() + engine.options.shutdown_timeout_s
    while asyncio.get_running_loop().time() < deadline:
        # Blocks that a decode engine may still come for hold the exit up, too.
        if not (scheduler.unfinished or scheduler.held):
            return
        await asyncio.sleep(_POLL_S)
    engine.abort_all()


def main() -> None:
    """Entry point."""
    try:
        options = parse(sys.argv[1:], os.environ)
    except OptionsError as error:
        sys.exit(f"mooncake_simulator.engine: {error}")
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if options.unknown_flags:
        LOG.warning("flags without a meaning here: %s", " ".join(options.unknown_flags))
    try:
        uvloop.run(serve(options) if options.group.rank == 0 else be_worker(options))
    except GroupError as error:
        sys.exit(f"mooncake_simulator.engine: {error}")
    except OSError as error:
        sys.exit(f"mooncake_simulator.engine: cannot listen: {error}")


if __name__ == "__main__":
    lose_what_cannot_be_written()
    allow_many_open_files()
    main()
