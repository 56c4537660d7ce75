"""Removing all that a cluster left on the machine, however it ended.

Works from what is there, not from what someone remembered: processes carry a mark in their environment,
Pods have a cgroup, mounts lie below the cluster's folder. So a cluster whose driver was killed goes as any
other.
"""

import shutil
import subprocess
import time
from pathlib import Path

from e2e.cluster import machine, network, processes
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_CNI_RESULTS = Path("/var/lib/cni/results")
_CONTAINER_LOGS = Path("/var/log/containers")


def clean(layout: Layout) -> None:
    """Leave nothing of a cluster: processes, Pods, cgroups, mounts, network, kernel parameters, files.

    Raises:
        ClusterError: something does not go away; the message says what.
    """
    # Those that would start again what is ended next go first.
    starters = ("kubelet", "kube-controller-manager", "kube-scheduler")
    processes.end(
        lambda: [pid for pid, line in processes.of_cluster(layout).items() if _runs(line, starters)]
    )
    _end_pods(layout)
    processes.end(lambda: processes.of_cluster(layout))
    _unmount(layout.state)
    _remove_cgroups(layout)
    network.delete(layout)
    for result in _CNI_RESULTS.glob(f"{layout.cni_network}-*"):
        result.unlink(missing_ok=True)
    _remove_log_links(layout)
    machine.restore(layout)
    shutil.rmtree(layout.state, ignore_errors=True)
    if layout.state.exists():
        raise ClusterError(
            f"{layout.state} cannot be removed; see what holds it with `findmnt | grep {layout.state}`"
        )


def traces(layout: Layout) -> list[str]:
    """What of a cluster is on the machine, in words; empty after :func:`clean`."""
    found = [f"process {pid}: {line}" for pid, line in processes.of_cluster(layout).items()]
    found += [f"cgroup {path}" for path in machine.cgroups(layout)]
    found += [f"mount {path}" for path in _mounts_below(layout.state)]
    found += [f"file {path}" for path in _CNI_RESULTS.glob(f"{layout.cni_network}-*")]
    found += [f"link {path}" for path in _log_links(layout)]
    if layout.network_namespace_path.exists():
        found.append(f"network namespace {layout.network_namespace}")
    if layout.state.exists():
        found.append(f"folder {layout.state}")
    return found


def _runs(command_line: str, names: tuple[str, ...]) -> bool:
    return Path(command_line.split(" ", 1)[0]).name in names


def _end_pods(layout: Layout) -> None:
    def alive() -> set[int]:
        pids = {pid for cgroup in machine.cgroups(layout) for pid in machine.processes_in(cgroup)}
        return {pid for pid in pids if processes.is_alive(pid)}

    processes.end(alive, patience_s=0.5)


def _unmount(below: Path) -> None:
    for mount in sorted(_mounts_below(below), reverse=True):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)


def _mounts_below(folder: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point == str(folder) or point.startswith(f"{folder}/")]


def _remove_cgroups(layout: Layout) -> None:
    # The kernel lets go of a cgroup a moment after its last process has ended.
    deadline = time.monotonic() + 10
    while left := list(machine.cgroups(layout)):
        for cgroup in left:
            try:
                cgroup.rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ClusterError(f"cgroup {cgroup} does not go away: {error}") from error
        time.sleep(0.05)


def _log_links(layout: Layout) -> list[Path]:
    if not _CONTAINER_LOGS.is_dir():
        return []
    return [
        path
        for path in _CONTAINER_LOGS.iterdir()
        if path.is_symlink() and path.readlink().is_relative_to(layout.state)
    ]


def _remove_log_links(layout: Layout) -> None:
    for link in _log_links(layout):
        link.unlink()
