"""Images without a registry: a base, a pause program, and the project's own Dockerfile built on that base."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.node import PAUSE_IMAGE
from e2e.cluster.programs import Say, cache_dir, find

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = "localhost/mooncake-e2e-base:bookworm"
REDIS_IMAGE = "localhost/mooncake-e2e-redis:1"
TARGETS = ("mooncake", "operator")
"""What the tests' Pods need. ``mooncake`` holds scheduler, sidecar and simulator."""

_PAUSE_SOURCE = """
#include <signal.h>
#include <unistd.h>
static void end(int number) { (void)number; _exit(0); }
int main(void) {
  signal(SIGTERM, end);
  signal(SIGINT, end);
  signal(SIGCHLD, SIG_IGN); /* orphans of a shared process namespace leave no zombies */
  for (;;) pause();
}
"""
_LAYERS_KEPT = 300
_ARCHIVES_KEPT = 4
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BASE_PACKAGES = "python3,python3-venv,ca-certificates,redis-server"


def product_image(target: str) -> str:
    """Name of the image of one target of the Dockerfile, as built here."""
    return f"localhost/mooncake-k8s-{target}:e2e"


def build(say: Say, targets: Sequence[str] = TARGETS) -> list[Path]:
    """Build base, Redis and the product's images; what has not changed is taken from the cache.

    Args:
        say: told what takes time.
        targets: of the project's Dockerfile.

    Returns:
        Archives to import, Redis' included.

    Raises:
        ClusterError: a build failed; the message has the end of its output.
    """
    store = _Store(cache_dir() / "images")
    with store.locked():
        base = _base(store, say)
        archives = [store.archive(REDIS_IMAGE, made_of=base, make=lambda: None)]
        sources = f"{base} {_digest_of_sources()}"
        for target in targets:
            make = partial(_build_target, store, target, base, say)
            archives.append(store.archive(product_image(target), made_of=sources, make=make))
        store.trim()
    return archives


def _build_target(store: "_Store", target: str, base: str, say: Say) -> None:
    say(f"building image {target}")
    store.buildah(
        *("build", "--isolation", "chroot", "--layers", "--pull-never", "--target", target),
        *("--build-arg", f"BASE={base}", "--tag", product_image(target)),
        # Where the machine's own authorities vouch for the package index, so must the build's.
        *("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"),
        str(ROOT),
    )


def _digest_of_sources() -> str:
    """A digest of all that the Dockerfile sees: what .dockerignore lets through, and itself."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = [ROOT / "Dockerfile", *(ROOT / line.removeprefix("!") for line in lines if line.startswith("!"))]
    files = [path for place in seen for path in ([place] if place.is_file() else place.rglob("*"))]
    digest = hashlib.sha256()
    for path in sorted(files):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def load(layout: Layout, archive: Path) -> None:
    """Import an image archive into the cluster's containerd, where the kubelet finds it.

    Raises:
        ClusterError: containerd refused it.
    """
    ran = subprocess.run(
        [find("ctr"), "-a", layout.containerd_socket, "-n", "k8s.io", "images", "import", archive],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ClusterError(f"importing {archive} failed: {ran.stderr.strip()}")


def tag(layout: Layout, image: str, again: str) -> None:
    """Give an image that the cluster has one more name.

    Raises:
        ClusterError: there is no such image.
    """
    client: list[str | Path] = [find("ctr"), "-a", layout.containerd_socket, "-n", "k8s.io"]
    ran = subprocess.run(
        [*client, "images", "tag", "--force", image, again], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise ClusterError(f"naming {image} also {again} failed: {ran.stderr.strip()}")


@contextmanager
def named_again(image: str, again: str) -> Iterator[Path]:
    """An archive of an image built here, under one more name; gone afterwards."""
    store = _Store(cache_dir() / "images")
    with store.locked(), tempfile.TemporaryDirectory(dir=store.folder) as folder:
        archive = Path(folder) / "again.tar"
        store.buildah("push", "--quiet", image, f"docker-archive:{archive}:{again}")
        yield archive


def load_pause(layout: Layout) -> None:
    """Make and import the program that holds a Pod's network open."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "pause.c", Path(folder) / "pause"
        source.write_text(_PAUSE_SOURCE)
        ran = subprocess.run(
            ["cc", "-static", "-O2", "-s", "-o", program, source], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise ClusterError(f"compiling the pause program failed: {ran.stderr}")
        layer = Path(folder) / "layer.tar"
        with tarfile.open(layer, "w") as tar:
            tar.add(program, arcname="pause")
        archive = Path(folder) / "pause-image.tar"
        _write_archive(archive, PAUSE_IMAGE, layer, {"Entrypoint": ["/pause"]})
        load(layout, archive)


class _Store:
    """buildah with a store of its own, beside the built programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def buildah(self, *arguments: str, check: bool = True) -> str:
        program = shutil.which("buildah")
        if program is None:
            raise ClusterError("buildah is missing: install the package buildah")
        command = [
            program,
            "--root",
            str(self.folder / "store"),
            "--runroot",
            str(self.folder / "run"),
            *arguments,
        ]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=_build_environment())
        if check and ran.returncode:
            raise ClusterError(f"`buildah {arguments[0]}` failed:\n{(ran.stdout + ran.stderr)[-4000:]}")
        return ran.stdout.strip()

    def has(self, image: str) -> bool:
        return bool(self.buildah("images", "--quiet", image, check=False))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One build at a time: another one would remove archives that this one is about to return."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def archive(self, image: str, *, made_of: str, make: Callable[[], object]) -> Path:
        """An archive of an image; the image is made only where what it is made of has changed."""
        name = image.rpartition("/")[2].replace(":", "-")
        archive = self.folder / f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.tar"
        if not archive.exists():
            make()
            part = self.folder / f".{name}.part"
            part.unlink(missing_ok=True)  # buildah adds to an archive that is there
            self.buildah("push", "--quiet", image, f"docker-archive:{part}:{image}")
            part.replace(archive)
            # Not all but the newest: another checkout may be about to load the one that it has built.
            archives = sorted(self.folder.glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime)
            for old in archives[:-_ARCHIVES_KEPT]:
                old.unlink()
        return archive

    def trim(self) -> None:
        """Drop intermediate layers once there are many; until then they make builds quick."""
        self.buildah("rm", "--all", check=False)  # of builds that failed
        if len(self.buildah("images", "--all", "--quiet").split()) > _LAYERS_KEPT:
            self.buildah("rmi", "--prune", check=False)


def _build_environment() -> dict[str, str]:
    return os.environ | {"TMPDIR": "/var/tmp", "STORAGE_DRIVER": "overlay"}


def _base(store: _Store, say: Say) -> str:
    """Debian with Python (and Redis, which tests run from the same layer): made once, then kept."""
    if store.has(BASE_IMAGE) and store.has(REDIS_IMAGE):
        return BASE_IMAGE
    say("making the base image (about 2 minutes the first time)")
    with tempfile.TemporaryDirectory(dir=store.folder) as folder:
        layer = Path(folder) / "base.tar"
        ran = subprocess.run(
            ["mmdebstrap", "--variant=minbase", f"--include={_BASE_PACKAGES}", "bookworm", layer],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise ClusterError(f"mmdebstrap failed:\n{ran.stderr[-3000:]}")
        archive = Path(folder) / "base-image.tar"
        _write_archive(archive, BASE_IMAGE, layer, {"Cmd": ["/bin/sh"]})
        identity = store.buildah("pull", "--quiet", f"docker-archive:{archive}")
    for name in (BASE_IMAGE, REDIS_IMAGE):
        store.buildah("tag", identity, name)
    return BASE_IMAGE


def _write_archive(archive: Path, image: str, layer: Path, config: dict[str, object]) -> None:
    """Write an image of one layer in the form of ``docker save``."""
    digest = hashlib.sha256()
    with layer.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    description = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": config,
            # buildah counts a base's layers by its history.
            "history": [{"created_by": "mooncake e2e"}],
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest.hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [image], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as tar:
        for name, content in (("config.json", description), ("manifest.json", manifest)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
        tar.add(layer, arcname="layer.tar")
