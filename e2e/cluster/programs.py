"""The programs that a cluster consists of: found where the machine has them, built where it has not.

Kubernetes publishes its programs as Go modules, so the Go client builds them. Each family of programs has a
module of its own under ``e2e/build`` (their dependencies clash in one), with versions and checksums
committed. What is built is kept outside the checkout, in ``$XDG_CACHE_HOME/mooncake/k8s/<family's
version>/``.
"""

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.errors import ClusterError

BUILD_DIR = Path(__file__).resolve().parent.parent / "build"
Say = Callable[[str], None]

_MINOR = re.compile(r"v?(\d+)\.(\d+)\.\d+")


@dataclass(frozen=True)
class Family:
    """Programs of one Go module, at the version that its ``go.mod`` requires."""

    name: str
    module: str
    packages: Mapping[str, str]
    version_command: Sequence[str] = ("--version",)
    tags: Sequence[str] = ()
    stamped: str | None = None
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        return BUILD_DIR / self.name

    @property
    def version(self) -> str:
        """The pinned version, e.g. ``v1.36.3``."""
        text = (self.source / "go.mod").read_text()
        found = re.search(rf"^(?:require )?\s*{re.escape(self.module)} (v\S+)", text, re.MULTILINE)
        if found is None:
            raise ClusterError(f"{self.source / 'go.mod'} does not require {self.module}")
        return found.group(1)

    @property
    def cache(self) -> Path:
        name = self.version if self.name == "kubernetes" else f"{self.name}-{self.version}"
        return cache_dir() / name

    def ldflags(self) -> str:
        """Linker flags; without its version a server calls itself v0.0.0-master and clients refuse it."""
        flags = ["-s", "-w"]
        if self.stamped:
            major, minor = _minor(self.version)
            values = {
                "gitVersion": self.version,
                "gitMajor": major,
                "gitMinor": minor,
                "gitTreeState": "clean",
            }
            flags += [f"-X {self.stamped}.{name}={value}" for name, value in values.items()]
        return " ".join(flags)


KUBERNETES = Family(
    name="kubernetes",
    module="k8s.io/kubernetes",
    # In an order that lets the later ones reuse what the first one compiled.
    packages={
        name: f"k8s.io/kubernetes/cmd/{name}"
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kubectl",
            "kube-proxy",
        )
    },
    stamped="k8s.io/component-base/version",
    commands={"kubectl": ("version", "--client")},
)
CONTAINERD = Family(
    name="containerd",
    module="github.com/containerd/containerd/v2",
    packages={
        name: f"github.com/containerd/containerd/v2/cmd/{name}"
        for name in ("containerd", "ctr", "containerd-shim-runc-v2")
    },
    tags=("no_btrfs", "no_zfs", "no_devmapper"),
    stamped="github.com/containerd/containerd/v2/version",
    commands={"containerd-shim-runc-v2": ("-v",)},
)
COREDNS = Family(
    name="coredns",
    module="github.com/coredns/coredns",
    packages={"coredns": "github.com/coredns/coredns"},
    version_command=("-version",),
)
HELM = Family(
    name="helm",
    module="helm.sh/helm/v4",
    packages={"helm": "helm.sh/helm/v4/cmd/helm"},
    version_command=("version", "--short"),
    stamped="helm.sh/helm/v4/internal/version",
)
FAMILIES = (KUBERNETES, CONTAINERD, COREDNS, HELM)


def cache_dir() -> Path:
    """Where built programs and base images are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mooncake" / "k8s"


def provide(say: Say, families: Sequence[Family] = FAMILIES) -> dict[str, Path]:
    """Find or build every program.

    Args:
        say: told what is being built, one line a program.
        families: what is wanted.

    Returns:
        A path for each program's name.

    Raises:
        ClusterError: a build failed, or Go is missing; what has been built until then stays in the cache.
    """
    found = {name: path for family in families for name, path in _present(family)}
    missing = [(family, name) for family in families for name in family.packages if name not in found]
    for number, (family, name) in enumerate(missing, start=1):
        say(f"[{number}/{len(missing)}] building {name} {family.version} (kept in {family.cache})")
        found[name] = _build(family, name, say)
    return found


def find(name: str) -> Path:
    """The path of a program that has been provided before.

    Raises:
        ClusterError: it is neither on this machine nor built.
    """
    for family in FAMILIES:
        for present, path in _present(family):
            if present == name:
                return path
    raise ClusterError(f"{name} is not built yet: run `python -m e2e.cluster build`")


def _present(family: Family) -> Iterator[tuple[str, Path]]:
    for name in family.packages:
        for candidate in _candidates(family, name):
            if candidate.is_file() and (candidate.parent == family.cache or _fits(family, name, candidate)):
                yield name, candidate
                break


def _candidates(family: Family, name: str) -> Iterator[Path]:
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        yield Path(assets) / name
    # A kubectl in a system's path is often a wrapper of another age; the cache knows what it holds.
    yield family.cache / name
    if on_path := shutil.which(name):
        yield Path(on_path)


def _fits(family: Family, name: str, program: Path) -> bool:
    """Whether a program of this machine has the pinned minor version: the parts of a cluster must agree."""
    command = family.commands.get(name, family.version_command)
    try:
        ran = subprocess.run([program, *command], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    said = _MINOR.search(ran.stdout + ran.stderr)
    return said is not None and (said.group(1), said.group(2)) == _minor(family.version)


def _minor(version: str) -> tuple[str, str]:
    match = _MINOR.match(version)
    if match is None:
        raise ClusterError(f"{version} is not a version")
    return match.group(1), match.group(2)


def _build(family: Family, name: str, say: Say) -> Path:
    go = shutil.which("go")
    if go is None:
        raise ClusterError(
            f"{name} {family.version} is missing, and so is Go to build it: install Go 1.26 or newer, or set "
            "KUBEBUILDER_ASSETS to a folder that has the programs"
        )
    family.cache.mkdir(parents=True, exist_ok=True)
    target = family.cache / name
    with _locked(family.cache / ".lock") as lock:
        if target.is_file():  # another process built it while this one waited
            return target
        started = time.monotonic()
        part = family.cache / f".{name}.part"
        try:
            _go_build(go, family, name, part, lock)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        say(f"built {name} in {time.monotonic() - started:.0f} s")
    return target


def _go_build(go: str, family: Family, name: str, output: Path, lock: int) -> None:
    """Build one program; the compiler holds the lock too, for it outlives a driver that is killed."""
    command = [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", family.ldflags(), "-o", str(output)]
    if family.tags:
        command += ["-tags", " ".join(family.tags)]
    command.append(family.packages[name])
    environment = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": os.environ.get("GOFLAGS", "-p=2")}
    ran = subprocess.run(
        ["nice", "-n", "10", *command],
        cwd=family.source,
        env=environment,
        pass_fds=[lock],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ClusterError(
            f"building {name} {family.version} in {family.source} failed:\n{ran.stderr[-4000:]}"
        )


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()
