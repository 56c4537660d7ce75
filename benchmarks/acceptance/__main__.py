"""Replay a trace through the quickstart, with two schedulers and with one. The last line is JSON.

Fails when a request is lost or fails, when fewer than 95 % complete, when one is refused without a reason,
when the token hit rate is not what an ample cache gives on this trace, or when two schedulers find another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "lib"))

from mooncake_simulator.workloads import generate, read_trace, token_hit_rate, write_trace
from mooncake_testing.cluster import cluster, until_none

ROOT = Path(__file__).parents[2]
PUBLISHED_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
REASONS = {"ttft", "tbt", "kv_memory", "tenant_quota"}
LEAST_COMPLETED = 0.95
MOST_OFF = 0.02


class Run(NamedTuple):
    """One replay."""

    schedulers: int
    seed: int
    figures: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", type=Path, help="default: the paper's conversation trace, else a generated one"
    )
    parser.add_argument("--limit", type=int, default=1000, help="requests (default: %(default)s)")
    parser.add_argument(
        "--speed", type=float, default=3.3, help="trace seconds a second (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="replays of each kind (default: %(default)s)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="acceptance-") as folder:
        trace = options.trace or (PUBLISHED_TRACE if PUBLISHED_TRACE.exists() else generated(Path(folder)))
        expected = token_hit_rate(read_trace(trace, limit=options.limit))
        print(
            f"{trace.name}: {options.limit} requests; an endless cache finds {expected:.3f} of their tokens"
        )
        runs = []
        for seed in range(options.seeds):
            for schedulers in (2, 1):
                arguments = ["--trace", str(trace), "--limit", str(options.limit)]
                arguments += ["--speed", str(options.speed), "--seed", str(seed)]
                run = Run(schedulers, seed, replayed(schedulers, arguments, Path(folder) / "figures.json"))
                runs.append(run)
                print(row(run), flush=True)
    broken = [*complaints(runs, expected), *apart(runs)]
    print(*(f"does not hold: {line}" for line in broken), sep="\n", end="\n" if broken else "")
    print(json.dumps(summary(runs, expected, broken)))
    return 1 if broken else 0


def generated(folder: Path) -> Path:
    """A workload like the conversation trace, where that is not at hand."""
    path = folder / "generated.jsonl"
    write_trace(path, generate(2000, 1))
    return path


def replayed(schedulers: int, arguments: list[str], figures: Path) -> dict[str, Any]:
    """Replay against a fresh quickstart; what it left behind is looked at too."""
    document = yaml.safe_load(QUICKSTART.read_text())
    document["spec"]["scheduler"]["replicas"] = schedulers
    with cluster(yaml.safe_dump(document)) as running:
        command = [sys.executable, "-P", "-m", "mooncakectl", "replay", "--url", running.endpoint]
        subprocess.run([*command, *arguments, "--json", str(figures)], check=True, stdout=subprocess.DEVNULL)
        until_none(running.work_in_the_ledger, "the ledger is empty")
        until_none(running.engines_at_work, "no engine works for nobody")
        until_none(running.index_disagrees, "Redis holds what the engines hold")
    told: dict[str, Any] = json.loads(figures.read_text())
    return told


def complaints(runs: list[Run], expected: float) -> list[str]:
    """Which promises single replays broke."""
    found = []
    for run in runs:
        told, name = run.figures, f"seed {run.seed}, {run.schedulers} schedulers"
        if told["completed"] < LEAST_COMPLETED * told["requests"]:
            found.append(f"{name}: {told['completed']} of {told['requests']} completed")
        if told["lost"] or told["failed"]:
            found.append(f"{name}: lost {told['lost_by_reason']}, failed {told['failed_by_reason']}")
        if not set(told["refused_by_reason"]) <= REASONS:
            found.append(f"{name}: refused {told['refused_by_reason']}")
        if not abs(told["token_hit_rate"] - expected) <= MOST_OFF:
            found.append(f"{name}: token hit rate {told['token_hit_rate']:.4f}, expected {expected:.4f}")
    return found


def apart(runs: list[Run]) -> list[str]:
    """Seeds for which two schedulers found another hit rate than one."""
    rates = {(run.seed, run.schedulers): run.figures["token_hit_rate"] for run in runs}
    return [
        f"seed {seed}: token hit rate {rates[seed, 1]:.4f} with one scheduler, {rates[seed, 2]:.4f} with two"
        for seed in sorted({run.seed for run in runs})
        if not abs(rates[seed, 1] - rates[seed, 2]) <= MOST_OFF
    ]


def row(run: Run) -> str:
    """One replay, for people; durations are model seconds."""
    told = run.figures
    ttft, tbt = told["ttft"], told["tbt"]
    return (
        f"seed {run.seed}  schedulers {run.schedulers}  completed {told['completed']:>5}"
        f"  refused {told['refused']:>3} {told['refused_by_reason']}"
        f"  failed {told['failed']}  lost {told['lost']}"
        f"  hit rate {told['token_hit_rate']:.4f}  TTFT p50 {ttft['p50_s']:.2f} s p90 {ttft['p90_s']:.2f} s"
        f"  TBT p90 {tbt['p90_s'] * 1000:.0f} ms  goodput {told['goodput']:.3f}  late {told['late_s']:.2f} s"
    )


def summary(runs: list[Run], expected: float, broken: list[str]) -> dict[str, Any]:
    """One JSON object for machines."""
    kept = ("requests", "completed", "refused", "failed", "lost", "token_hit_rate", "goodput", "ttft", "tbt")
    return {
        "expected_token_hit_rate": round(expected, 4),
        "runs": [
            {"schedulers": run.schedulers, "seed": run.seed} | {name: run.figures[name] for name in kept}
            for run in runs
        ],
        "holds": not broken,
    }


if __name__ == "__main__":
    sys.exit(main())
