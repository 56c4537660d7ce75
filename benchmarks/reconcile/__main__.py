"""1 000 Pods to Ready, ours against Deployments: `python benchmarks/reconcile`. The last line is JSON.

Makes a cluster of its own (see `docs/adr/0021`), takes its one real node out, and measures inside of it.
The 50 pools are 25 MooncakeClusters of one prefill and one decode pool, each in a namespace; the 50
Deployments have the same Pods without the readiness gate. Schedulers are played: where each scheduler's Pod
has its address, a registry answers that knows the engines whose containers are ready. So ours waits for one
more write of the operator and one more of the kubelet for each Pod, and has disruption budgets, which a
controller of Kubernetes keeps up to date meanwhile. What these alone cost is measured in between: "alike" are
Deployments with budgets and a gate that is opened at once. Calls are counted by user in the API server's
audit log, Leases apart.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from e2e.cluster import kubeconfig, network
from e2e.cluster.cluster import Cluster, Options
from e2e.cluster.errors import ClusterError

from accounts import AUDIT_POLICY

CLUSTER = "reconcile"
NOT_NEEDED = ("kubelet", "kube-proxy", "containerd", "coredns")
"""Of no use to Pods that are played, and hungry: both sides are measured without."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, default=25, help="of two pools each (default: %(default)s)")
    parser.add_argument("--instances", type=int, default=20, help="of each pool (default: %(default)s)")
    parser.add_argument("--namespaces", type=int, help="shared by the clusters (default: one each)")
    parser.add_argument("--nodes", type=int, default=20, help="played nodes (default: %(default)s)")
    parser.add_argument(
        "--start", type=float, default=1.6, help="seconds from bound to ready, as of a real kubelet (1.6)"
    )
    parser.add_argument("--idle", type=float, default=180.0, help="seconds to watch for writes at rest")
    parser.add_argument(
        "--no-change", action="store_true", help="leave out the change of one field in all (half of the time)"
    )
    parser.add_argument("--workers", type=int, help="passes at a time (default: the operator's)")
    parser.add_argument("--profile", type=Path, help="write a cProfile of the operator to this file")
    parser.add_argument(
        "--keep-logs", type=Path, help="copy the operator's log and the audit log to this folder"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-reconcile-") as folder:
        try:
            return run(arguments, Path(folder))
        except ClusterError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Measure in a cluster that is there for this alone; returns the exit code."""
    policy, audit = folder / "audit-policy.yaml", folder / "audit.log"
    policy.write_text(AUDIT_POLICY)
    watched = [
        f"--audit-policy-file={policy}",
        f"--audit-log-path={audit}",
        "--audit-log-mode=batch",
        "--audit-log-maxsize=4096",
    ]
    cluster = Cluster(CLUSTER)
    try:
        # A busy machine delays played heartbeats too; nodes that are given up would be another benchmark.
        patient = ["--node-monitor-grace-period=600s"]
        flags = {"kube-apiserver": watched, "kube-controller-manager": patient}
        cluster.start(say, Options(arguments=flags))
        layout = cluster.layout
        inside = folder / "admin.kubeconfig"
        kubeconfig.write(layout, inside, "admin", f"https://{layout.node_ip}:{layout.apiserver_port}")
        cluster.kubectl("delete", "node", layout.node)
        for program in NOT_NEEDED:
            cluster.kill(program)
        # Whatever address a played Pod is given is an address of this machine, inside the namespace.
        route = ["ip", "-n", layout.network_namespace, "route", "add", "local", "10.128.0.0/12", "dev", "lo"]
        subprocess.run(route, check=True)
        measure = [
            sys.executable,
            str(Path(__file__).with_name("measure.py")),
            *("--kubeconfig", str(inside), "--audit", str(audit), "--folder", str(folder)),
            *("--cluster", CLUSTER),
            *("--clusters", str(arguments.clusters), "--instances", str(arguments.instances)),
            *("--nodes", str(arguments.nodes), "--idle", str(arguments.idle)),
            *("--start", str(arguments.start)),
        ]
        for name in ("workers", "namespaces"):
            if (value := getattr(arguments, name)) is not None:
                measure += [f"--{name}", str(value)]
        if arguments.no_change:
            measure.append("--no-change")
        if arguments.profile:
            measure += ["--profile", str(arguments.profile.resolve())]
        status = subprocess.run(network.inside(layout, measure), check=False).returncode
    finally:
        cluster.stop()
    if arguments.keep_logs:
        arguments.keep_logs.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob("*.log"), *folder.glob("*.err")):
            (arguments.keep_logs / file.name).write_bytes(file.read_bytes())
    return status


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
