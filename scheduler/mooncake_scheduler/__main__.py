"""`python -m mooncake_scheduler --config FILE`: run a scheduler until SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import structlog
import uvloop

from mooncake_core.collector import freeze_what_lives
from mooncake_core.config.base import ConfigError
from mooncake_core.config.scheduler import SchedulerConfig
from mooncake_core.ending import then_exit
from mooncake_core.open_files import allow_many_open_files
from mooncake_core.standard_streams import lose_what_cannot_be_written
from mooncake_scheduler.assembly import build_scheduler, wanted_ports


def main(arguments: list[str] | None = None) -> int:
    """Run; returns the exit status (2: the configuration cannot be used, 1: a port cannot be bound)."""
    parser = argparse.ArgumentParser(prog="mooncake_scheduler", description="Mooncake's scheduler service")
    parser.add_argument("--config", type=Path, required=True, help="scheduler.json (SchedulerConfig)")
    parser.add_argument("--serving-port", type=int, help="instead of serving.port")
    parser.add_argument("--admin-port", type=int, help="instead of admin.port")
    options = parser.parse_args(arguments)
    try:
        config = SchedulerConfig.load(options.config)
        config = wanted_ports(config, options.serving_port, options.admin_port)
        _configure_log(config.log_level)
        uvloop.run(then_exit(_serve(config)))
    except ConfigError as error:
        print(f"mooncake_scheduler: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"mooncake_scheduler: {error}", file=sys.stderr)
        return 1


async def _serve(config: SchedulerConfig) -> int:
    scheduler = build_scheduler(config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await scheduler.start()
    freeze_what_lives()
    await stopping.wait()
    await scheduler.stop()
    return 0


def _configure_log(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    lose_what_cannot_be_written()
    allow_many_open_files()
    raise SystemExit(main())
