"""`python -m mooncake_sidecar.engine`: run beside an engine. `… drain`: empty it, as a preStop hook."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress

import httpx
import structlog
import uvloop
from pydantic import ValidationError

from mooncake_core.config import SidecarConfig
from mooncake_core.config.base import ConfigError
from mooncake_core.ending import then_exit
from mooncake_core.registry.memory import HEARTBEAT_TTL_S
from mooncake_core.standard_streams import lose_what_cannot_be_written
from mooncake_sidecar.engine.connections import callers
from mooncake_sidecar.engine.drain import drain
from mooncake_sidecar.engine.engine_probe import EngineProbe, Health
from mooncake_sidecar.engine.server import build_server
from mooncake_sidecar.engine.sidecar import Sidecar

CONFIG_VARIABLE = "MOONCAKE_SIDECAR_CONFIG"
_BEYOND_DRAIN_S = 5.0
_ASK_AGAIN_S = 0.5
FORGOTTEN_AFTER_S = HEARTBEAT_TTL_S + 1.0


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status.

    2: the configuration cannot be used. 1: a port or the journal cannot be had; for `drain`, that work was
    left when the time was over.
    """
    parser = argparse.ArgumentParser(prog="python -m mooncake_sidecar.engine", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["run", "drain"], default="run")
    options = parser.parse_args(arguments)
    try:
        config = read_config()
    except ConfigError as error:
        print(f"mooncake_sidecar: {error}", file=sys.stderr)
        return 2
    if options.command == "drain":
        return ask_to_drain(config)
    _configure_log(config)
    try:
        uvloop.run(then_exit(_run(config)))
    except (OSError, ValueError) as error:
        print(f"mooncake_sidecar: {error}", file=sys.stderr)
        return 1


def read_config() -> SidecarConfig:
    """The configuration from the environment.

    Raises:
        ConfigError: it is absent or wrong; the message names the field.
    """
    text = os.environ.get(CONFIG_VARIABLE)
    if not text:
        raise ConfigError(f"${CONFIG_VARIABLE} is not set: it holds the SidecarConfig as JSON")
    try:
        return SidecarConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise ConfigError(f"${CONFIG_VARIABLE}: {where}: {first['msg']}") from error


def ask_to_drain(config: SidecarConfig) -> int:
    """Have the sidecar that runs here drain its engine, through its restarts if need be.

    A sidecar that was told to end has drained on its own account and may be gone: then the engine is asked.
    """
    host = "127.0.0.1" if config.listen.host in ("0.0.0.0", "::") else config.listen.host
    deadline_s = time.monotonic() + config.drain_timeout_s
    alone_since_s: float | None = None
    with httpx.Client(base_url=f"http://{host}:{config.listen.port}", trust_env=False) as http:
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                answer = http.post("/drain", params={"timeout_s": left_s}, timeout=left_s + _BEYOND_DRAIN_S)
                print(f"mooncake_sidecar: drain: {answer.text}")
                return 0 if answer.status_code == 200 else 1
            except httpx.HTTPError as error:
                now_s = time.monotonic()
                alone_since_s = alone_since_s or now_s
                # By then schedulers have forgotten an instance that nobody keeps registered.
                if now_s - alone_since_s > FORGOTTEN_AFTER_S and asyncio.run(_is_idle(config)):
                    print(f"mooncake_sidecar: drain: no sidecar answers ({error!r}), the engine is idle")
                    return 0
            time.sleep(min(_ASK_AGAIN_S, left_s))
    print("mooncake_sidecar: drain: the time is over and the engine still works", file=sys.stderr)
    return 1


async def _is_idle(config: SidecarConfig) -> bool:
    probe = EngineProbe(config.engine_url)
    try:
        load = await probe.load()
        if load.is_told:
            return not (load.running or load.waiting)
        # Schedulers that forgot it dropped their idle connections: who is left waits for an answer.
        return callers(config.engine_url) == 0
    except ConnectionError:
        return await probe.health() is Health.DEAD
    finally:
        await probe.close()


async def _run(config: SidecarConfig) -> int:
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    sidecar = Sidecar(config)
    server = build_server(sidecar)
    serving = asyncio.create_task(server.serve(), name="http")
    working = asyncio.create_task(sidecar.run(), name="sidecar")
    stopped = asyncio.create_task(stopping.wait(), name="stop")
    try:
        await asyncio.wait({serving, working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            await _empty(sidecar, hurry)
    finally:
        server.should_exit = True
        for task in (working, stopped):
            task.cancel()
        ended = await asyncio.gather(working, stopped, serving, return_exceptions=True)
        await sidecar.close()
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return 0 if stopping.is_set() else 1


async def _empty(sidecar: Sidecar, hurry: asyncio.Event) -> None:
    """Let the engine finish what it has: in a Pod that ends, this process is told at the same time as it.

    A second signal cuts this short.
    """
    draining = asyncio.create_task(drain(sidecar, sidecar.config.drain_timeout_s), name="drain")
    hurrying = asyncio.create_task(hurry.wait(), name="hurry")
    await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurrying):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _configure_log(config: SidecarConfig) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(instance=config.instance)


if __name__ == "__main__":
    lose_what_cannot_be_written()
    sys.exit(main())
