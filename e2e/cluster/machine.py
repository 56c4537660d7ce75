"""What a cluster changes on the machine, noted before, and put back afterwards.

The kubelet sets kernel parameters when it starts; hugepages are taken for it; where cgroup v1 is in use, the
hugetlb hierarchy may have to be mounted.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
_SET_BY_KUBELET = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
_PARAMETERS = ".parameters.json"
_CGROUPS = Path("/sys/fs/cgroup")


def prepare(layout: Layout, hugepages_2mi: int) -> None:
    """Note what will change, take the hugepages, and make the cgroups for the cluster's Pods.

    Args:
        layout: the cluster.
        hugepages_2mi: pages of 2 MiB to add to those that the machine has; its node offers them all.

    Raises:
        ClusterError: the machine has not that many free in one piece.
    """
    _note_parameters(layout)
    before = int(_HUGEPAGES.read_text()) if hugepages_2mi else 0
    mounts_hugetlb = hugepages_2mi > 0 and _lacks_hugetlb()
    noted = {"hugepages_before": before, "hugepages_added": hugepages_2mi, "mounts_hugetlb": mounts_hugetlb}
    layout.machine.write_text(json.dumps(noted))
    if mounts_hugetlb:
        (_CGROUPS / "hugetlb").mkdir(exist_ok=True)
        _run("mount", "-t", "cgroup", "-o", "hugetlb", "hugetlb", str(_CGROUPS / "hugetlb"))
    if hugepages_2mi:
        _HUGEPAGES.write_text(str(before + hugepages_2mi))
        got = int(_HUGEPAGES.read_text()) - before
        if got < hugepages_2mi:
            raise ClusterError(
                f"wanted {hugepages_2mi} pages of 2 MiB, the kernel found {got}: free memory, or ask for less"
            )
    for hierarchy in hierarchies():
        _make_cgroup(hierarchy / layout.cgroup)


def restore(layout: Layout) -> None:
    """Put back what :func:`prepare` noted; nothing noted, nothing to do.

    Clusters end in any order: each gives back the hugepages that it added, and the last one the kernel
    parameters, for all kubelets set them alike.
    """
    if layout.machine.exists():
        noted = json.loads(layout.machine.read_text())
        if noted.get("hugepages_added") and int(_HUGEPAGES.read_text()) != noted["hugepages_before"]:
            _HUGEPAGES.write_text(str(max(0, int(_HUGEPAGES.read_text()) - noted["hugepages_added"])))
        if noted.get("mounts_hugetlb"):
            with suppress(ClusterError):  # unmounted already
                _run("umount", str(_CGROUPS / "hugetlb"))
            with suppress(OSError):
                (_CGROUPS / "hugetlb").rmdir()
        layout.machine.unlink()
    if not _others(layout):
        _restore_parameters(layout)


def _note_parameters(layout: Layout) -> None:
    note = layout.state.parent / _PARAMETERS
    if not (note.exists() and _others(layout)):
        paths = [Path("/proc/sys") / name for name in _SET_BY_KUBELET]
        note.write_text(json.dumps({str(path): path.read_text().strip() for path in paths if path.exists()}))


def _restore_parameters(layout: Layout) -> None:
    note = layout.state.parent / _PARAMETERS
    if note.exists():
        for name, value in json.loads(note.read_text()).items():
            if Path(name).read_text().strip() != value:
                Path(name).write_text(value)
        note.unlink()


def _others(layout: Layout) -> list[Path]:
    """Folders of other clusters on this machine."""
    return [path for path in layout.state.parent.iterdir() if path.is_dir() and path != layout.state]


def hierarchies() -> Iterator[Path]:
    """Where cgroup hierarchies are mounted: one with cgroup v2, many with v1."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] in ("cgroup", "cgroup2"):
            yield Path(left.split()[4])


def cgroups(layout: Layout) -> Iterator[Path]:
    """All cgroups of the cluster's Pods, innermost first; some may vanish meanwhile, as their Pods end."""
    for hierarchy in hierarchies():
        found = [Path(path) for path, _, _ in os.walk(hierarchy / layout.cgroup)]
        yield from sorted(found, key=lambda path: -len(path.parts))


def processes_in(cgroup: Path) -> list[int]:
    with suppress(OSError):
        return [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]
    return []


def _lacks_hugetlb() -> bool:
    controllers = _CGROUPS / "cgroup.controllers"
    if controllers.exists():  # cgroup v2
        return False
    supported = {line.split()[0] for line in Path("/proc/cgroups").read_text().splitlines()[1:]}
    return "hugetlb" in supported and not (_CGROUPS / "hugetlb" / "cgroup.procs").exists()


def _make_cgroup(path: Path) -> None:
    path.mkdir(exist_ok=True)
    if path.parent.name == "cpuset" or (path.parent / "cpuset.cpus").exists():
        # v1's cpuset starts empty, and nothing may run in an empty one.
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (path / name).exists() and not (path / name).read_text().strip():
                (path / name).write_text((path.parent / name).read_text())
    subtree = path / "cgroup.subtree_control"
    if subtree.exists():
        available = (path / "cgroup.controllers").read_text().split()
        if available:
            subtree.write_text(" ".join(f"+{name}" for name in available))


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {ran.stderr.strip()}")
