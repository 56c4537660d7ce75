"""Images without a registry: a base, a pause program, and the project's own Dockerfile built on that base."""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
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
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }
"""
_LAYERS_KEPT = 300
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
    base = _base(store, say)
    archives = [_exported(store, REDIS_IMAGE)]
    for target in targets:
        say(f"building image {target}")
        store.buildah(
            *("build", "--isolation", "chroot", "--layers", "--pull-never", "--target", target),
            *("--build-arg", f"BASE={base}", "--tag", product_image(target)),
            # Where the machine's own authorities vouch for the package index, so must the build's.
            *("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"),
            str(ROOT),
        )
        archives.append(_exported(store, product_image(target)))
    store.trim()
    return archives


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

    def identity(self, image: str) -> str | None:
        """The id of an image, None where there is none."""
        return self.buildah("images", "--quiet", "--no-trunc", image, check=False) or None

    def trim(self) -> None:
        """Drop the build's intermediate layers once there are many; until then they are what makes it quick."""
        if len(self.buildah("images", "--all", "--quiet").split()) > _LAYERS_KEPT:
            self.buildah("rmi", "--prune", check=False)


def _build_environment() -> dict[str, str]:
    return os.environ | {"TMPDIR": "/var/tmp", "STORAGE_DRIVER": "overlay"}


def _base(store: _Store, say: Say) -> str:
    """Debian with Python (and Redis, which tests run from the same layer): made once, then kept."""
    if store.identity(BASE_IMAGE) and store.identity(REDIS_IMAGE):
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


def _exported(store: _Store, image: str) -> Path:
    """An archive of an image, written anew only where the image has changed."""
    identity = store.identity(image)
    if identity is None:
        raise ClusterError(f"image {image} was not built")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    name = image.rpartition("/")[2].replace(":", "-")
    archive = store.folder / f"{name}-{digest}.tar"
    if not archive.exists():
        for old in store.folder.glob(f"{name}-*.tar"):
            old.unlink()
        part = archive.with_suffix(f".{os.getpid()}")
        store.buildah("push", "--quiet", image, f"docker-archive:{part}:{image}")
        part.replace(archive)
    return archive


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
