"""`make bench-router`: CPU per request of this gateway and of vllm-router, side by side in one run.

Method after vllm-router's docs/benchmarks/router_overhead.md: the same fake engines, bodies and client; what
is counted is CPU of the router's whole process tree (wait4), not time. A chunk's cost is what a streamed
answer of many chunks costs beyond one of few, divided by the chunks between them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import load
from mooncakectl.local.programs import find_redis_server
from routers import Engines, PeerMissingError, RouterProcess, ours, vllm_router

KEYS = ["regular_c1", "regular_c16", "pd_c1", "pd_c16", "chunk"]
GOAL = 0.8
FEW_CHUNKS, MANY_CHUNKS = 10, 110
BODY_BYTES = 2048

Router = Callable[..., AbstractAsyncContextManager[RouterProcess]]


async def cpu_us(
    start: Router, engines: Engines, arguments: argparse.Namespace, *, port: int, disaggregated: bool = False,
    concurrency: int = 1, stream_tokens: int = 0, count: int, **options: Any,
) -> float:  # fmt: skip
    """CPU microseconds a request in one router process, start-up and warm-up not counted."""
    made = load.requests(
        count + arguments.warm_up, body_bytes=BODY_BYTES, stream=stream_tokens > 0,
        max_tokens=stream_tokens or 1, seed=port,
    )  # fmt: skip
    async with start(
        engines, disaggregated=disaggregated, port=port, redis_url=arguments.redis_url, **options
    ) as router:
        await load.run(port, made[: arguments.warm_up], concurrency)
        before = router.cpu_so_far_s()
        result = await load.run(port, made[arguments.warm_up :], concurrency)
        spent = router.stop() - before
    if result.answered != count:
        raise RuntimeError(f"{result.errors} of {count} requests failed")
    return spent / count * 1e6


async def measure(
    start: Router, engines: Engines, arguments: argparse.Namespace, port: int
) -> dict[str, float]:
    """All five figures of one router."""
    n = arguments.requests
    figures: dict[str, float] = {}
    for key, disaggregated, concurrency in [
        ("regular_c1", False, 1), ("regular_c16", False, 16), ("pd_c1", True, 1), ("pd_c16", True, 16),
    ]:  # fmt: skip
        figures[key] = await cpu_us(
            start,
            engines,
            arguments,
            port=port,
            disaggregated=disaggregated,
            concurrency=concurrency,
            count=n,
        )
        port += 4
    streams = max(16, n // 20)
    few = await cpu_us(
        start, engines, arguments, port=port, stream_tokens=FEW_CHUNKS, concurrency=16, count=streams
    )
    many = await cpu_us(
        start, engines, arguments, port=port + 4, stream_tokens=MANY_CHUNKS, concurrency=16, count=streams
    )
    figures["chunk"] = (many - few) / (MANY_CHUNKS - FEW_CHUNKS)
    return figures


def show(figures: dict[str, dict[str, float]], ratios: dict[str, float], extra: dict[str, str]) -> None:
    """The table for people."""
    table = Table(title="CPU of the router's process tree, µs a request (chunk: µs an SSE chunk)")
    for column in ["", *figures, "ratio", f"goal ≤ {GOAL}"]:
        table.add_column(column, justify="right" if column else "left")
    for key in KEYS:
        verdict = "held" if ratios[key] <= GOAL else "missed"
        table.add_row(key, *(f"{figures[name][key]:.1f}" for name in figures), f"{ratios[key]:.2f}", verdict)
    for key, value in extra.items():
        table.add_row(key, value, *[""] * (len(figures) + 1))
    Console(width=110).print(table)


async def main(arguments: argparse.Namespace) -> int:
    """Run everything; exit code 1 when a peer is missing."""
    with ExitStack() as stack:
        folder = Path(__file__).parent
        engine = subprocess.Popen(
            [sys.executable, str(folder / "fake_engine.py"), *(str(19100 + n) for n in range(4))],
            stdout=subprocess.PIPE,
        )
        stack.callback(engine.kill)
        assert engine.stdout is not None
        engine.stdout.readline()
        redis = subprocess.Popen(
            [str(find_redis_server()), "--port", "19190", "--save", "", "--hash-max-ziplist-value", "1024"],
            stdout=subprocess.DEVNULL,
        )
        stack.callback(redis.kill)
        arguments.redis_url = "redis://127.0.0.1:19190/0"
        engines = Engines([19100 + n for n in range(4)])
        rounds: dict[str, list[dict[str, float]]] = {"ours": [], "vllm-router": []}
        try:
            # Alternating rounds: a noisy minute of the machine then hits both.
            for number in range(arguments.rounds):
                base = 19200 + 100 * number
                rounds["ours"].append(await measure(ours, engines, arguments, base))
                rounds["vllm-router"].append(await measure(vllm_router, engines, arguments, base + 50))
        except PeerMissingError as error:
            Console().print(f"[red]vllm-router: missing[/red] ({error})")
            return 1
        figures = {
            name: {key: statistics.median(r[key] for r in made) for key in KEYS}
            for name, made in rounds.items()
        }
        ratios = {
            key: statistics.median(
                a[key] / b[key] for a, b in zip(rounds["ours"], rounds["vllm-router"], strict=True)
            )
            for key in KEYS
        }
        many = await cpu_us(ours, engines, arguments, port=19900, concurrency=16, count=arguments.requests,
                            extra_instances=60)  # fmt: skip
        show(figures, ratios, {"64 instances, regular_c16 (no goal)": f"{many:.1f}"})
    rounded = {name: {k: round(v, 1) for k, v in row.items()} for name, row in figures.items()}
    print(
        json.dumps({"cpu_us": rounded, "ratio_to_vllm_router": {k: round(v, 3) for k, v in ratios.items()}})
    )
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=int(os.environ.get("BENCH_REQUESTS", "4000")))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=400)
    sys.exit(asyncio.run(main(parser.parse_args())))
