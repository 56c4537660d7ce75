"""`python -m mooncake_simulator.store master …` and `… node …`, with the flags of Mooncake's own programs."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from mooncake_core.open_files import allow_many_open_files
from mooncake_core.profiles import PROFILES
from mooncake_core.standard_streams import lose_what_cannot_be_written
from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.master import Master
from mooncake_simulator.store.node import Node
from mooncake_simulator.store.promotions import PromotionRules
from mooncake_simulator.store.sizes import SizeError, parse_size

LOG = logging.getLogger("mooncake_simulator.store")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except SizeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _yes_or_no(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text == "true"


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mooncake_simulator.store", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    master = commands.add_parser("master", help="the directory", allow_abbrev=False)
    master.add_argument("--host", default="0.0.0.0")
    master.add_argument("--rpc-port", type=int, default=50051)
    master.add_argument("--metrics-port", type=int, default=9003)
    master.add_argument("--eviction-high-watermark-ratio", type=float, default=0.9)
    master.add_argument("--eviction-ratio", type=float, default=0.05)
    master.add_argument("--default-kv-lease-ttl", type=int, default=10_000, metavar="MS")
    master.add_argument("--client-ttl", type=float, default=10.0, metavar="S")
    rules = PromotionRules()
    master.add_argument(
        "--promotion-on-hit", type=_yes_or_no, nargs="?", const=True, default=rules.on_hit, metavar="BOOL"
    )
    master.add_argument(
        "--promotion-admission-threshold", type=_at_least_one, default=rules.admission_threshold
    )
    master.add_argument("--promotion-max-per-heartbeat", type=_at_least_one, default=rules.max_per_heartbeat)
    node = commands.add_parser("node", help="a holder of objects", allow_abbrev=False)
    node.add_argument("--host", default="127.0.0.1", help="address under which others reach it")
    node.add_argument("--port", type=int, default=50052)
    node.add_argument("--http-port", type=int, default=9300)
    node.add_argument("--global-segment-size", type=_size, required=True, metavar="BYTES")
    node.add_argument("--ssd-size", type=_size, default=0, metavar="BYTES")
    node.add_argument("--master-server-address", required=True, metavar="HOST:PORT")
    node.add_argument("--profile", choices=sorted(PROFILES), default="llama3-70b-8xa800")
    node.add_argument("--time-scale", type=float, default=1.0)
    return parser


async def _until_told(stop_service: Callable[[], Awaitable[None]]) -> None:
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()
    await stop_service()


async def _run_master(flags: argparse.Namespace) -> None:
    directory = Directory(
        high_watermark=flags.eviction_high_watermark_ratio,
        eviction_ratio=flags.eviction_ratio,
        lease_s=flags.default_kv_lease_ttl / 1000,
        client_ttl_s=flags.client_ttl,
        promotion=PromotionRules(
            on_hit=flags.promotion_on_hit,
            admission_threshold=flags.promotion_admission_threshold,
            max_per_heartbeat=flags.promotion_max_per_heartbeat,
        ),
    )
    master = Master(directory)
    rpc_port, metrics_port = await master.start(flags.host, flags.rpc_port, flags.metrics_port)
    LOG.info("master: rpc on %s:%d, admin on port %d", flags.host, rpc_port, metrics_port)
    await _until_told(master.stop)


async def _run_node(flags: argparse.Namespace) -> None:
    node = Node(
        flags.master_server_address,
        capacity_bytes=flags.global_segment_size,
        ssd_capacity_bytes=flags.ssd_size,
        profile=PROFILES[flags.profile],
        time_scale=flags.time_scale,
    )
    # Who is known at the loopback is to be reached from nowhere else.
    listen = flags.host if flags.host == "127.0.0.1" else "0.0.0.0"
    await node.start(listen, flags.port, flags.http_port, flags.host)
    LOG.info("node %s: %d bytes of memory, %d of SSD", node.name, flags.global_segment_size, flags.ssd_size)
    await _until_told(node.stop)


def main() -> None:
    """Entry point."""
    flags, unknown = _parser().parse_known_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if unknown:
        LOG.warning("flags without a meaning here: %s", " ".join(unknown))
    run = _run_master if flags.command == "master" else _run_node
    try:
        uvloop.run(run(flags))
    except (OSError, ValueError) as error:
        sys.exit(f"mooncake_simulator.store {flags.command}: {error}")


if __name__ == "__main__":
    lose_what_cannot_be_written()
    allow_many_open_files()
    main()
