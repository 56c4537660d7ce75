"""Policies live and simulated: what the simulator puts in an order, the running cluster must put in the same.

For each policy the quickstart runs with two schedulers, as processes on this machine, and answers two
workloads: the demo's, and the beginning of the paper's conversation trace. The simulator answers the same
manifest and the same requests. Prefill instances keep to their own caches (no KV cache pool) unless --store
is given: behind a shared store policies are hard to tell apart. The last line is JSON.

One generated workload of 240 requests puts two policies in an order that the next one turns round: the demo's
figures are means over several seeds, of which those that take a minute each are fewer.

Fails where two policies whose mean TTFT the simulator puts more than a tenth apart stand the other way round,
or where a request is refused, lost or fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "lib"))

from mooncake_core.api.cluster import MooncakeCluster
from mooncake_core.api.manifests import load_manifests
from mooncake_simulator.cluster.manifest import spec_of
from mooncake_simulator.cluster.simulation import simulate
from mooncake_simulator.workloads import Request, read_trace, write_trace
from mooncake_testing.cluster import cluster
from mooncakectl.commands.demo import workload

ROOT = Path(__file__).parents[2]
PUBLISHED_TRACE = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
APART = 1.1


class Figures(NamedTuple):
    """What came of one run of a workload."""

    ttft_s: float
    hits: float
    unanswered: int = 0
    late_s: float = 0.0


class Answer(NamedTuple):
    """What one policy made of one workload."""

    workload: str
    policy: str
    live_ttft_s: float
    simulated_ttft_s: float
    live_hits: float
    simulated_hits: float
    unanswered: int
    late_s: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default="kv-centric,cache-aware,load-balance,random")
    parser.add_argument("--trace", type=Path, default=PUBLISHED_TRACE, help="the second workload")
    parser.add_argument("--limit", type=int, default=400, help="requests of it (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.33, help="its model speed (default: %(default)s)")
    parser.add_argument(
        "--time-scale", type=int, default=10, help="model seconds a second (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=10, help="of the demo, simulated (default: %(default)s)")
    parser.add_argument("--live-seeds", type=int, default=2, help="of those, live (default: %(default)s)")
    parser.add_argument("--store", action="store_true", help="keep the quickstart's KV cache pool")
    parser.add_argument("--json", type=Path, help="write the last line's document there too")
    options = parser.parse_args()

    works = {"demo": ([workload(240, seed + 1) for seed in range(options.seeds)], 1.0)}
    if options.trace.exists():
        works["replay"] = ([read_trace(options.trace, limit=options.limit)], options.load)
    else:
        print(f"{options.trace}: not there: the demo's workload only", file=sys.stderr)
    answers = []
    for name, (variants, load) in works.items():
        for policy in options.policies.split(","):
            manifest = manifest_for(policy, options.time_scale, options.store)
            simulated = [in_the_simulator(manifest, each, load) for each in variants]
            speed = load * options.time_scale
            live = [replayed(manifest, each, speed) for each in variants[: options.live_seeds]]
            answers.append(answer(name, policy, live, simulated))
            print(row(answers[-1]), flush=True)
    broken = [
        *turned(answers),
        *(f"{a.workload}, {a.policy}: {a.unanswered}" for a in answers if a.unanswered),
    ]
    print(*(f"does not hold: {line}" for line in broken), sep="\n", end="\n" if broken else "")
    document = {"answers": [a._asdict() for a in answers], "holds": not broken}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 1 if broken else 0


def manifest_for(policy: str, time_scale: int, store: bool) -> str:
    """The quickstart with two schedulers and another policy; nobody is refused."""
    document = yaml.safe_load(QUICKSTART.read_text())
    spec = document["spec"]
    spec["scheduler"]["replicas"] = 2
    spec["scheduler"]["routing"]["policy"] = policy
    spec["scheduler"]["admission"]["mode"] = "none"
    spec["engine"]["simulated"]["timeScale"] = time_scale
    # Each stage checks its targets where nobody is refused at the door; without them all are served.
    spec.pop("slo")
    if not store:
        spec.pop("kvCachePools")
    return yaml.safe_dump(document)


def answer(name: str, policy: str, live: Sequence[Figures], simulated: Sequence[Figures]) -> Answer:
    """One policy, live and simulated: means over the runs, and the sum and the worst of what went wrong."""
    return Answer(
        name, policy,
        fmean(each.ttft_s for each in live), fmean(each.ttft_s for each in simulated),
        fmean(each.hits for each in live), fmean(each.hits for each in simulated),
        sum(each.unanswered for each in live), max(each.late_s for each in live),
    )  # fmt: skip


def in_the_simulator(manifest: str, requests: Sequence[Request], load: float) -> Figures:
    """The figures of a simulation of the same cluster."""
    (wanted,) = [each for each in load_manifests(manifest) if isinstance(each, MooncakeCluster)]
    told = simulate(spec_of(wanted), requests, speed=load)
    return Figures(told.mean_ttft_s, told.token_hit_rate)


def replayed(manifest: str, requests: Sequence[Request], speed: float) -> Figures:
    """The figures of a replay against a fresh cluster."""
    with tempfile.TemporaryDirectory(prefix="policies-") as folder, cluster(manifest) as running:
        trace, figures = Path(folder) / "trace.jsonl", Path(folder) / "figures.json"
        write_trace(trace, requests)
        command = [sys.executable, "-P", "-m", "mooncakectl", "replay", "--url", running.endpoint]
        options = ["--trace", str(trace), "--speed", str(speed), "--json", str(figures)]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        told: dict[str, Any] = json.loads(figures.read_text())
    unanswered = told["requests"] - told["completed"]
    return Figures(told["ttft"]["mean_s"], told["token_hit_rate"], unanswered, told["late_s"])


def turned(answers: Sequence[Answer]) -> list[str]:
    """Pairs of policies that stand the other way round than simulated."""
    found = []
    for one, other in combinations(answers, 2):
        better, worse = sorted((one, other), key=lambda each: each.simulated_ttft_s)
        apart = worse.simulated_ttft_s > APART * better.simulated_ttft_s
        if one.workload == other.workload and apart and better.live_ttft_s >= worse.live_ttft_s:
            found.append(
                f"{one.workload}: {better.policy} before {worse.policy} simulated "
                f"({better.simulated_ttft_s:.2f} s, {worse.simulated_ttft_s:.2f} s), behind it live "
                f"({better.live_ttft_s:.2f} s, {worse.live_ttft_s:.2f} s)"
            )
    return found


def row(answer: Answer) -> str:
    """For people; durations are model seconds."""
    return (
        f"{answer.workload:<7} {answer.policy:<13} mean TTFT live {answer.live_ttft_s:6.2f} s  "
        f"simulated {answer.simulated_ttft_s:6.2f} s   hits live {answer.live_hits:.3f}  "
        f"simulated {answer.simulated_hits:.3f}   unanswered {answer.unanswered}  late {answer.late_s:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
