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
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "lib"))

import load
from floor import STEPS
from mooncake_testing.ports import free_ports
from mooncake_testing.toy_model import write_toy_model
from mooncakectl.local.programs import find_redis_server
from routers import (
    Engines,
    PeerMissingError,
    RouterProcess,
    cpu_of,
    ensure_vllm_router,
    floor,
    ours,
    vllm_router,
    wait_listening,
)

KEYS = ["regular_c1", "regular_c16", "pd_c1", "pd_c16", "chunk"]
GOAL = 0.8
FEW_CHUNKS, MANY_CHUNKS = 10, 110
BODY_BYTES = 2048

Router = Callable[..., AbstractAsyncContextManager[RouterProcess]]


@dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    engines: Engines
    redis: subprocess.Popen[bytes]
    redis_url: str
    requests: int
    warm_up: int

    async def cpu_us(
        self, start: Router, *, disaggregated: bool = False, concurrency: int = 16, stream_tokens: int = 0,
        count: int | None = None, text: bool = False, **options: Any,
    ) -> tuple[float, float]:  # fmt: skip
        """CPU microseconds a request of one router process, and of Redis; start and warm-up do not count."""
        count = count or self.requests
        port = free_ports(2)
        made = load.requests(
            count + self.warm_up, body_bytes=BODY_BYTES, stream=stream_tokens > 0,
            max_tokens=stream_tokens or 1, seed=count, text=text,
        )  # fmt: skip
        async with start(
            self.engines, disaggregated=disaggregated, port=port, redis_url=self.redis_url, **options
        ) as router:
            await load.run(port, made[: self.warm_up], concurrency)
            before, redis_before = router.cpu_so_far_s(), cpu_of(self.redis.pid)
            result = await load.run(port, made[self.warm_up :], concurrency)
            redis_spent = cpu_of(self.redis.pid) - redis_before
            spent = router.stop() - before
        if result.answered != count:
            raise RuntimeError(f"{result.errors} of {count} requests failed")
        return spent / count * 1e6, redis_spent / count * 1e6

    async def measure(self, start: Router) -> dict[str, float]:
        """All five figures of one router, and what Redis spent beside it."""
        figures: dict[str, float] = {}
        figures["regular_c1"], _ = await self.cpu_us(start, concurrency=1)
        figures["regular_c16"], figures["redis"] = await self.cpu_us(start)
        figures["pd_c1"], _ = await self.cpu_us(start, disaggregated=True, concurrency=1)
        figures["pd_c16"], figures["redis_pd"] = await self.cpu_us(start, disaggregated=True)
        streams = max(16, self.requests // 20)
        few, _ = await self.cpu_us(start, stream_tokens=FEW_CHUNKS, count=streams)
        many, _ = await self.cpu_us(start, stream_tokens=MANY_CHUNKS, count=streams)
        figures["chunk"] = (many - few) / (MANY_CHUNKS - FEW_CHUNKS)
        return figures

    async def extra_rows(self, ours_rounds: list[dict[str, float]]) -> dict[str, float]:
        """Rows without a goal: what only this router does, or does at another size."""
        many, _ = await self.cpu_us(ours, extra_instances=60)
        with tempfile.TemporaryDirectory() as folder:
            worded, _ = await self.cpu_us(ours, text=True, model_path=write_toy_model(Path(folder)))
        floors = {
            f"floor, {step}, regular_c{concurrency}": (
                await self.cpu_us(floor, step=step, concurrency=concurrency)
            )[0]
            for step in STEPS
            for concurrency in (1, 16)
        }
        return floors | {
            "Redis' CPU, regular": statistics.median(r["redis"] for r in ours_rounds),
            "Redis' CPU, P/D": statistics.median(r["redis_pd"] for r in ours_rounds),
            "text prompts, tokenised here, regular_c16": worded,
            "64 instances, regular_c16": many,
        }


def show(figures: dict[str, dict[str, float]], ratios: dict[str, float], extra: dict[str, float]) -> None:
    """The table for people."""
    table = Table(title="CPU of the router's process tree, µs a request (chunk: µs an SSE chunk)")
    for column in ["", *figures, "ratio", f"goal ≤ {GOAL}"]:
        table.add_column(column, justify="right" if column else "left")
    for key in KEYS:
        verdict = "held" if ratios[key] <= GOAL else "missed"
        table.add_row(key, *(f"{figures[name][key]:.1f}" for name in figures), f"{ratios[key]:.2f}", verdict)
    for key, value in extra.items():
        table.add_row(key, f"{value:.1f}", *[""] * (len(figures)), "no goal")
    Console(width=110).print(table)


async def main(arguments: argparse.Namespace) -> int:
    """Run everything; exit code 1 when a peer is missing."""
    with ExitStack() as stack:
        first_port = free_ports(5)
        *engine_ports, redis_port = range(first_port, first_port + 5)
        engine = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "fake_engine.py"), *map(str, engine_ports)],
            stdout=subprocess.PIPE,
        )
        stack.callback(engine.kill)
        assert engine.stdout is not None
        engine.stdout.readline()
        redis = subprocess.Popen(
            [str(find_redis_server()), "--port", str(redis_port), "--save", "", "--bind", "127.0.0.1",
             "--hash-max-ziplist-value", "1024"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(redis.kill)
        wait_listening(redis_port)
        url = f"redis://127.0.0.1:{redis_port}/0"
        bench = Bench(Engines(engine_ports), redis, url, arguments.requests, arguments.warm_up)
        rounds: dict[str, list[dict[str, float]]] = {"ours": [], "vllm-router": []}
        try:
            ensure_vllm_router()
            # Alternating rounds: a noisy minute of the machine then hits both.
            for _ in range(arguments.rounds):
                rounds["ours"].append(await bench.measure(ours))
                rounds["vllm-router"].append(await bench.measure(vllm_router))
        except PeerMissingError as error:
            Console().print(f"[red]vllm-router: missing[/red] ({error})")
            print(json.dumps({"cpu_us": {"vllm-router": None}, "ratio_to_vllm_router": None}))
            return 1
        extra = await bench.extra_rows(rounds["ours"])
    figures = {
        name: {key: statistics.median(r[key] for r in made) for key in KEYS} for name, made in rounds.items()
    }
    pairs = list(zip(rounds["ours"], rounds["vllm-router"], strict=True))
    ratios = {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in KEYS}
    show(figures, ratios, extra)
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
