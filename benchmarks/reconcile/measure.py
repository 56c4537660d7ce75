"""The measuring itself, inside the cluster's network: Deployments first, then the operator."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
import uvloop
import yaml
from e2e.kube import Kube
from e2e.played_kubelet import Behaviour, NodeShape, PlayedNodes

from accounts import AuditLog, Call, Usage, counted, find_programs, usage_of
from gate_keeper import GATE, GateKeeper
from schedulers import ENGINES, ROLE_LABEL, PlayedSchedulers
from workload import Object, budgets, cluster, deployments, secret

ROOT = Path(__file__).resolve().parents[2]
OURS, BUILT_IN, ALIKE = "ours", "built-in", "alike"
ACCOUNT = "system:serviceaccount:mooncake-system:mooncake-operator"
CONTROLLERS = tuple(
    f"system:serviceaccount:kube-system:{name}-controller" for name in ("deployment", "replicaset")
)
AUDIT_LAG_S = 3.0
"""The API server writes its audit log in batches."""
PATIENCE_S = 900.0


@dataclass
class Phase:
    """What one step cost one side."""

    seconds: float
    calls: list[Call]
    cpu_s: dict[str, float]
    rss_mib: float
    peak_mib: float

    @property
    def writes(self) -> int:
        return sum(call.writes for call in self.calls)


@dataclass
class Side:
    """One of the two, and how it fared."""

    name: str
    namespaces: list[str]
    users: tuple[str, ...]
    program: str
    phases: dict[str, Phase] = field(default_factory=dict)

    def namespace(self, number: int) -> str:
        """Where a cluster, or what stands for it, lives."""
        return self.namespaces[number % len(self.namespaces)]


class Bench:
    def __init__(self, arguments: argparse.Namespace, kube: Kube, played: PlayedNodes) -> None:
        self._arguments = arguments
        self._kube = kube
        self.played = played
        self._audit = AuditLog(arguments.audit)
        self._programs = find_programs(f"MOONCAKE_TEST_CLUSTER={arguments.cluster}")
        self._programs["played kubelets"] = os.getpid()
        self.operator: subprocess.Popen[bytes] | None = None
        self.wanted = arguments.clusters * 2 * arguments.instances

    def watch_over(self, operator: subprocess.Popen[bytes]) -> None:
        """Count the operator in, and notice when it ends."""
        self.operator = operator
        self._programs["operator"] = operator.pid

    async def measure(
        self, side: Side, phase: str, begin: Callable[[], Any], ended: Callable[[], tuple[int, bool]]
    ) -> None:
        """Run one step, and note what it cost."""
        self._audit.news()
        before = self._usages()
        began_s = time.monotonic()
        await begin()
        shown_s = 0.0
        while True:
            number, over = ended()
            now_s = time.monotonic() - began_s
            if over:
                break
            if self.operator is not None and self.operator.poll() is not None:
                raise SystemExit(
                    f"the operator ended by itself, with {self.operator.returncode}; see its log"
                )
            if now_s > PATIENCE_S:
                raise SystemExit(f"{side.name}, {phase}: not within {PATIENCE_S:.0f} s")
            if now_s - shown_s >= 2:
                shown_s = now_s
                say(f"{side.name:>9} {phase:<8} {now_s:6.1f} s  {number:>5} of {self.wanted}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(AUDIT_LAG_S)
        side.phases[phase] = self._phase(side, now_s, before)
        say(f"{side.name:>9} {phase:<8} {now_s:6.1f} s  done")

    async def rest(self, side: Side, seconds: float) -> None:
        """Let nothing happen for a while, and see who writes nevertheless."""
        # What the step before has left to be done belongs to that step: statuses, the last deletions.
        await self._quiet(side)
        before = self._usages()
        for minute in range(int(seconds // 30)):
            say(f"{side.name:>9} idle     {minute * 30:6.1f} s")
            await asyncio.sleep(30)
        await asyncio.sleep(seconds % 30 + AUDIT_LAG_S)
        side.phases["idle"] = self._phase(side, seconds, before)

    async def _quiet(self, side: Side) -> None:
        for _ in range(30):
            self._audit.news()
            await asyncio.sleep(2 * AUDIT_LAG_S)
            if not any(call.writes for call in self._of(side, self._audit.news())):
                return
        say(f"{side.name} does not come to rest within 3 minutes")

    def _usages(self) -> dict[str, Usage]:
        # The operator is a child of this process.
        return {name: usage_of(pid, with_children=pid != os.getpid()) for name, pid in self._programs.items()}

    def _phase(self, side: Side, seconds: float, before: dict[str, Usage]) -> Phase:
        now = self._usages()
        cpu_s = {name: now[name].cpu_s - before[name].cpu_s for name in now if name in before}
        own = now[side.program]
        calls = self._of(side, self._audit.news())
        return Phase(seconds, calls, cpu_s, own.rss_bytes / 2**20, own.peak_bytes / 2**20)

    @staticmethod
    def _of(side: Side, calls: Iterable[Call]) -> list[Call]:
        return [call for call in calls if call.user in side.users]

    def ready(self, side: Side, is_current: Callable[[Object], bool]) -> Callable[[], tuple[int, bool]]:
        """Counts Ready Pods that are as wanted; over when all are, and no others are left."""

        namespaces = frozenset(side.namespaces)

        def count() -> tuple[int, bool]:
            good = others = 0
            for pod, _ in self.played.pods():
                metadata = pod["metadata"]
                labels = metadata.get("labels") or {}
                engine = labels.get(ROLE_LABEL) in ENGINES or "app" in labels
                if metadata["namespace"] not in namespaces or not engine:
                    continue
                if is_ready(pod) and "deletionTimestamp" not in metadata and is_current(pod):
                    good += 1
                else:
                    others += 1
            return good, good >= self.wanted and not others

        return count

    async def gone(self, side: Side) -> None:
        """Wait until nothing of a side is left on the nodes."""
        say(f"{side.name:>9} removing")
        while any(pod["metadata"]["namespace"] in side.namespaces for pod, _ in self.played.pods()):
            await asyncio.sleep(0.5)


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def scale_of(pod: Object) -> str:
    """The one field that is changed, as it arrives in the Pod."""
    engine = next(c for c in pod["spec"]["containers"] if c["name"] == "engine")
    found: str = engine["args"][engine["args"].index("--time-scale") + 1]
    return found


async def main(arguments: argparse.Namespace) -> None:
    behaviour = Behaviour(start_s=arguments.start)
    async with (
        await Kube.of(arguments.kubeconfig) as kube,
        PlayedNodes(kube, arguments.nodes, script=lambda _: behaviour, shape=NodeShape()) as played,
        PlayedSchedulers(played),
    ):
        await kube.apply_all(load(*sorted((ROOT / "crds").glob("*.yaml"))))
        bench = Bench(arguments, kube, played)
        numbers = range(min(arguments.namespaces or arguments.clusters, arguments.clusters))
        built_in = Side(BUILT_IN, [f"built-in-{n}" for n in numbers], CONTROLLERS, "kube-controller-manager")
        ours = Side(OURS, [f"ours-{n}" for n in numbers], (ACCOUNT,), "operator")
        alike = Side(ALIKE, [f"alike-{n}" for n in numbers], CONTROLLERS, "kube-controller-manager")
        for name in (*built_in.namespaces, *alike.namespaces, *ours.namespaces, "mooncake-system"):
            await kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        await measure_deployments(bench, built_in, kube, arguments)
        await bench.gone(built_in)
        await measure_alike(bench, alike, kube, arguments)
        await bench.gone(alike)
        async with operator(arguments, kube) as process:
            bench.watch_over(process)
            await measure_clusters(bench, ours, kube, arguments)
        report(bench, (built_in, alike, ours))


async def measure_deployments(bench: Bench, side: Side, kube: Kube, arguments: argparse.Namespace) -> None:
    async def apply(time_scale: int) -> None:
        wanted = [
            deployment
            for number in range(arguments.clusters)
            for deployment in deployments(
                number, arguments.instances, side.namespace(number), time_scale=time_scale
            )
        ]
        await asyncio.gather(*map(kube.apply, wanted))

    await bench.measure(side, "create", lambda: apply(10), bench.ready(side, lambda pod: True))
    if not arguments.no_change:
        is_changed = bench.ready(side, lambda pod: scale_of(pod) == "20")
        await bench.measure(side, "change", lambda: apply(20), is_changed)
    for namespace in side.namespaces:
        await kube.delete("Namespace", namespace)


async def measure_alike(bench: Bench, side: Side, kube: Kube, arguments: argparse.Namespace) -> None:
    """Deployments whose Pods have a readiness gate and budgets, as a cluster's have."""

    async def apply() -> None:
        wanted = []
        for number in range(arguments.clusters):
            namespace = side.namespace(number)
            wanted += budgets(number, arguments.instances, namespace)
            wanted += deployments(number, arguments.instances, namespace, gate=GATE)
        await asyncio.gather(*map(kube.apply, wanted))

    async with GateKeeper(kube, bench.played, frozenset(side.namespaces)):
        await bench.measure(side, "create", apply, bench.ready(side, lambda pod: True))
    for namespace in side.namespaces:
        await kube.delete("Namespace", namespace)


async def measure_clusters(bench: Bench, side: Side, kube: Kube, arguments: argparse.Namespace) -> None:
    async def apply(time_scale: int) -> None:
        wanted = [
            cluster(number, arguments.instances, side.namespace(number), time_scale=time_scale)
            for number in range(arguments.clusters)
        ]
        await asyncio.gather(*map(kube.apply, wanted))

    await asyncio.gather(*(kube.create(secret(namespace)) for namespace in side.namespaces))
    await bench.measure(side, "create", lambda: apply(10), bench.ready(side, lambda pod: True))
    if not arguments.no_change:
        is_changed = bench.ready(side, lambda pod: scale_of(pod) == "20")
        await bench.measure(side, "change", lambda: apply(20), is_changed)
    await bench.rest(side, arguments.idle)


@asynccontextmanager
async def operator(arguments: argparse.Namespace, kube: Kube) -> Any:
    """The operator as its image runs it, under an account of its own, so that its calls are known by it."""
    token = await account(kube)
    folder: Path = arguments.folder
    admin = yaml.safe_load(arguments.kubeconfig.read_text())
    admin["users"][0]["user"] = {"token": token}
    own = folder / "operator.kubeconfig"
    own.write_text(yaml.safe_dump(admin))
    settings = {"LEASE_NAMESPACE": "mooncake-system", "LISTEN": "127.0.0.1"}
    if arguments.workers:
        settings["WORKERS"] = str(arguments.workers)
    environment = {f"MOONCAKE_OPERATOR_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "mooncake_operator"]
    if arguments.profile:
        command = [sys.executable, "-m", "cProfile", "-o", str(arguments.profile), "-m", "mooncake_operator"]
    with (folder / "operator.log").open("wb") as log, (folder / "operator.err").open("wb") as errors:
        process = subprocess.Popen(
            command,
            env=os.environ | environment | {"KUBECONFIG": str(own)},
            stdout=log,
            stderr=errors,
            cwd="/",
        )
    try:
        await leads(process)
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


async def leads(process: subprocess.Popen[bytes]) -> None:
    """Wait until the operator has its Lease and watches, as the built-in controllers do all the time."""
    say(f"{OURS:>9} starting")
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with session.get("http://127.0.0.1:8080/metrics") as answer:
                    if "mooncake_leader 1.0" in await answer.text():
                        break
            await asyncio.sleep(0.2)
    await asyncio.sleep(3)


async def account(kube: Kube) -> str:
    """A service account that may do everything; its token. What it needs is the chart's matter."""
    namespace, name = "mooncake-system", "mooncake-operator"
    reference = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    await kube.create(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}
    )
    await kube.create(
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "bench-reconcile"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "cluster-admin",
            },
            "subjects": [reference],
        }
    )
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    asked = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": 36000},
    }
    token: str = (await kube.call("POST", path, asked))["status"]["token"]
    return token


def report(bench: Bench, all_sides: Sequence[Side]) -> None:
    """The table, and the line for machines."""
    *_, ours = all_sides
    print(f"\n{'':<34}" + "".join(f"{side.name:>12}" for side in all_sides))
    for phase in ours.phases:
        sides = [side.phases.get(phase) for side in all_sides]
        row(f"{phase}: seconds", sides, lambda p: f"{p.seconds:.1f}")
        row(f"{phase}: API calls a Pod", sides, lambda p: f"{len(p.calls) / bench.wanted:.2f}")
        row(f"{phase}: writes", sides, lambda p: str(p.writes))
        row(f"{phase}: RSS, MiB", sides, lambda p: f"{p.rss_mib:.0f}")
        for program in ours.phases[phase].cpu_s:
            row(f"{phase}: CPU s, {program}", sides, lambda p, n=program: f"{p.cpu_s.get(n, 0.0):.1f}")
        row(f"{phase}: CPU s together", sides, lambda p: f"{sum(p.cpu_s.values()):.1f}")
        for calls, number in counted(ours.phases[phase].calls).most_common(16):
            print(f"    {number:>6} {calls}")
    create, idle = ours.phases["create"], ours.phases["idle"]
    taken = {side.name: side.phases["create"].seconds for side in all_sides}
    for what, number in counted([call for call in idle.calls if call.writes]).items():
        print(f"written while idle: {number} × {what}")
    print(
        json.dumps(
            {
                "ours_s": round(taken[OURS], 2),
                "builtin_s": round(taken[BUILT_IN], 2),
                "ratio": round(taken[OURS] / taken[BUILT_IN], 3),
                "alike_s": round(taken[ALIKE], 2),
                "ratio_alike": round(taken[OURS] / taken[ALIKE], 3),
                "api_calls_per_pod": round(len(create.calls) / bench.wanted, 2),
                "idle_writes": idle.writes,
                "rss_mib": round(max(phase.peak_mib for phase in ours.phases.values())),
            }
        )
    )


def row(title: str, sides: list[Phase | None], show: Callable[[Phase], str]) -> None:
    print(f"{title:<34}" + "".join(f"{'' if side is None else show(side):>12}" for side in sides))


def load(*files: Path) -> list[Object]:
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--audit", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cluster", required=True)
    for name in ("clusters", "instances", "nodes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--idle", type=float, required=True)
    parser.add_argument("--start", type=float, required=True)
    parser.add_argument("--namespaces", type=int)
    parser.add_argument("--no-change", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--profile", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(main(parse()))
