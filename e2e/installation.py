"""The operator as users install it: by the chart, with the images under test."""

import json
import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster import machine, programs
from e2e.cluster.errors import ClusterError
from e2e.under_test import ClusterUnderTest

CHART = Path(__file__).resolve().parent.parent / "helm" / "mooncake"
_TIMEOUT = "400s"
_PROGRAM = b"-m\0mooncake_operator"


@dataclass(frozen=True)
class Operator:
    """A release of the chart.

    Attributes:
        cluster: where it is.
        release: its name, and that of the operator's objects.
        namespace: of the operator's Pods, made where it is not there.
        session: marks its Pods, so that a later session's are new ones: images under test keep their names.
    """

    cluster: ClusterUnderTest
    release: str = "mooncake"
    namespace: str = "mooncake-system"
    session: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    @property
    def name(self) -> str:
        """Of the Deployment, of the Lease and of the service account."""
        return f"{self.release}-operator"

    def install(self, values: Mapping[str, Any] | None = None) -> None:
        """Install the chart, or upgrade what an earlier session left; on return the operator is ready.

        Args:
            values: besides those that name the images; as in ``values.yaml``.

        Raises:
            ClusterError: helm failed; with what it and the operator said.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("images.yaml", "values.yaml")]
            for file, content in zip(files, (self._images(), values or {}), strict=True):
                file.write_text(json.dumps(content))
            try:
                self.helm(
                    *("upgrade", "--install", self.release, str(CHART), "--create-namespace"),
                    *(f"--values={file}" for file in files),
                    *("--wait", f"--timeout={_TIMEOUT}"),
                )
            except ClusterError as error:
                raise ClusterError(f"{error}\n{self.describe()}") from error

    def uninstall(self) -> None:
        """``helm uninstall``; what it leaves, it leaves."""
        self.helm("uninstall", self.release, "--wait", f"--timeout={_TIMEOUT}", "--ignore-not-found")

    def kill(self) -> None:
        """End all its processes with SIGKILL; the kubelet starts them again.

        In a cluster that is not this machine's, its Pods are deleted without grace instead.

        Raises:
            ClusterError: there is none.
        """
        own = self.cluster.own
        if own is None:
            selector = "--selector=app.kubernetes.io/component=operator"
            self._kubectl("delete", "pods", selector, "--grace-period=0", "--force")
            return
        inside = {pid for cgroup in machine.cgroups(own.layout) for pid in machine.processes_in(cgroup)}
        killed = [pid for pid in inside if _PROGRAM in _command_line(pid)]
        if not killed:
            raise ClusterError(f"no process of the operator runs in cluster {own.layout.name}")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    def helm(self, *arguments: str) -> str:
        """Run helm for the release's namespace; what it printed.

        Raises:
            ClusterError: it failed; the message is what it said.
        """
        with tempfile.TemporaryDirectory() as home:
            # Its own folders: nothing of the user's configuration counts, nothing is left in it.
            folders = {f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
            ran = subprocess.run(
                [
                    str(programs.find("helm")),
                    f"--kubeconfig={self.cluster.kubeconfig}",
                    f"--namespace={self.namespace}",
                    *arguments,
                ],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | folders,
            )
        if ran.returncode:
            raise ClusterError(f"helm {arguments[0]}: {ran.stderr.strip()}")
        return ran.stdout

    def logs(self, *, since_s: float | None = None) -> str:
        """What all its Pods said, also those containers' predecessors that crashed."""
        selector = "--selector=app.kubernetes.io/component=operator"
        since = [f"--since={max(1, round(since_s))}s"] if since_s is not None else []
        said = ""
        for more in ([], ["--previous"]):
            said += self._kubectl("logs", selector, "--prefix", "--tail=-1", *since, *more)
        return said

    def describe(self) -> str:
        """What is there of it, for a message of failure."""
        return self._kubectl("describe", "pods") + self.logs()

    def _images(self) -> dict[str, Any]:
        repository, _, tag = self.cluster.image("operator").rpartition(":")
        return {
            "operator": {
                "image": {"repository": repository, "tag": tag},
                "podAnnotations": {"mooncake.io/e2e-session": self.session},
            },
            "images": {"mooncake": self.cluster.image("mooncake"), "redis": self.cluster.redis_image},
        }

    def _kubectl(self, *arguments: str) -> str:
        ran = subprocess.run(
            [
                programs.find("kubectl"),
                f"--kubeconfig={self.cluster.kubeconfig}",
                f"--namespace={self.namespace}",
                *arguments,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.stdout + ran.stderr


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""
