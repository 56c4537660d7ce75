"""Measure the prefix index: `python benchmarks/index`. The last line is JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "lib"))

from mooncake_testing.redis import start_redis
from query import SIZES, compare
from residency import Figures, measure_redis

ROWS = {
    "bytes_per_block": ("bytes a block, one holder", 20.0),
    "bytes_per_extra_holder": ("bytes for each further holder, 4 in all", 5.0),
    "bytes_per_extra_holder_of_64": ("bytes for each further holder, 64 in all", 5.0),
    "inserts_per_s": ("inserts/s (batches of 256 blocks)", None),
    "match_8192_at_4_ms": ("match of 8 192 blocks, 4 instances, ms", 1.0),
    "match_8192_at_64_ms": ("match of 8 192 blocks, 64 instances, ms", 5.0),
    "match_256_at_4_ms": ("match of 256 blocks, 4 instances, ms", None),
    "match_256_at_64_ms": ("match of 256 blocks, 64 instances, ms", None),
    "growth": ("bytes after all unique prefixes / after a fifth", 1.1),
}
PUBLISHED = (
    "bytes_per_block", "bytes_per_extra_holder", "inserts_per_s",
    "match_8192_at_4_ms", "match_8192_at_64_ms", "match_256_at_4_ms",
)  # fmt: skip
HEADLINE_TOKENS = 4096


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, help="blocks in the index (default: %(default)s)"
    )
    blocks = parser.parse_args().blocks

    # Resident memory says something of the index only where nothing else lived before.
    command = [sys.executable, str(Path(__file__).with_name("residency.py")), str(blocks)]
    memory = Figures(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    with tempfile.TemporaryDirectory(prefix="bench-index-") as folder:
        server = start_redis(Path(folder))
        try:
            redis = asyncio.run(measure_redis(server.url, blocks))
            ours, dynamo = asyncio.run(compare(server.url))
        finally:
            server.stop()

    print(f"\n{blocks:,} blocks{'':<38}{'memory':>10}{'Redis':>10}{'goal':>10}")
    for name, (title, goal) in ROWS.items():
        values = (getattr(memory, name), getattr(redis, name))
        wanted = "" if goal is None else f"≤ {goal:g}"
        print(f"{title:<52}{_number(values[0]):>10}{_number(values[1]):>10}{wanted:>10}")
    print(f"\n{'/query, ms':<52}{'ours':>10}{'Dynamo':>10}")
    missing = isinstance(dynamo, Exception)
    for tokens in SIZES:
        theirs = "missing" if missing else _number(dynamo[tokens])
        print(f"{f'{tokens:,} tokens':<52}{_number(ours[tokens]):>10}{theirs:>10}")
    print("(ours: the admin port of a scheduler, index on Redis; Dynamo's: Rust, in its own memory)")
    if missing:
        print(f"dynamo.indexer is missing: {dynamo}")
    print()
    print(
        json.dumps(
            {
                "redis": _published(redis),
                "memory": _published(memory),
                "dynamo_indexer": {
                    "query_ms": None if missing else round(dynamo[HEADLINE_TOKENS], 4),
                    "ours_query_ms": round(ours[HEADLINE_TOKENS], 4),
                },
            }
        )
    )
    return int(missing)


def _published(figures: Figures) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(figures).items() if name in PUBLISHED}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
