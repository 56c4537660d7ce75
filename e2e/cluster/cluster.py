"""A cluster from its first process to its last trace."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import (
    certificates,
    control_plane,
    debian,
    images,
    kubeconfig,
    leftovers,
    machine,
    network,
    node,
    processes,
    programs,
)
from e2e.cluster.control_plane import Arguments
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.locks import alone
from e2e.cluster.programs import Say
from e2e.cluster.system_objects import system_objects

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """How a cluster is to be.

    Attributes:
        hugepages_2mi: pages of 2 MiB to add to those that the machine has; the node offers them all.
        arguments: more arguments for programs, by name (``kube-apiserver``, ``kube-controller-manager``, …).
    """

    hugepages_2mi: int = 0
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Cluster:
    """One cluster on this machine, addressed by its name.

    Holds nothing that the machine does not: another process, later, may stop what this one started.
    """

    def __init__(self, name: str = "e2e") -> None:
        self.layout = Layout(name)

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig

    def start(self, say: Say, options: Options | None = None) -> None:
        """Provide the programs, remove what an earlier cluster of this name left, start, and wait for Ready.

        On return the node is Ready, the cluster's names resolve and the pause image is there.

        Raises:
            ClusterError: something failed; what had started is ended, its logs are quoted in the message.
        """
        if os.geteuid() != 0:
            raise ClusterError("a cluster needs root: network namespaces, mounts and cgroups are made")
        debian.provide(say)
        found = programs.provide(say)
        with self._changing():
            self._clean()
            started = time.monotonic()
            try:
                self._start(found, options or Options())
            except BaseException:
                self._keep_logs()
                self._clean()
                raise
            say(f"cluster {self.layout.name} is ready after {time.monotonic() - started:.1f} s")

    def stop(self) -> None:
        """Leave nothing of the cluster; a cluster that is not there is no error."""
        with self._changing():
            self._clean()

    def is_running(self) -> bool:
        """Whether the API server answers."""
        if not self.kubeconfig.exists():
            return False
        return self._kubectl("get", "--raw", "/readyz").returncode == 0

    def load(self, archive: Path) -> None:
        """Import an image archive for the cluster's Pods."""
        images.load(self.layout, archive)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as the cluster's admin.

        Returns:
            What it printed.

        Raises:
            ClusterError: it failed; the message is what it said.
        """
        ran = self._kubectl(*arguments, stdin=stdin)
        if ran.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments[:3])}: {ran.stderr.strip()}")
        return ran.stdout

    def restart(self, program: str) -> None:
        """End one program of the cluster with SIGKILL and start it again, as after a crash.

        Args:
            program: the name of its log, e.g. ``kube-apiserver`` or ``kubelet``.
        """
        with self._changing():
            self.kill(program)
            self._spawn_again(program)

    def kill(self, program: str) -> None:
        """End one program of the cluster with SIGKILL."""
        command = self._commands()[program]

        def alive() -> list[int]:
            running = processes.of_cluster(self.layout).items()
            return [pid for pid, line in running if line.split(" ", 1)[0] == command[0]]

        processes.end(alive, patience_s=0)

    def _commands(self) -> dict[str, list[str]]:
        loaded: dict[str, list[str]] = json.loads((self.layout.config / "commands.json").read_text())
        return loaded

    def _spawn_again(self, program: str) -> None:
        processes.spawn(self.layout, program, self._commands()[program])

    def _start(self, found: Mapping[str, Path], options: Options) -> None:
        layout = self.layout
        for folder in (layout.state, layout.config, layout.logs, layout.kubelet):
            folder.mkdir(parents=True)
        layout.state.chmod(0o700)
        machine.prepare(layout, options.hugepages_2mi)
        network.create(layout)
        certificates.create(layout)
        arguments = Arguments(options.arguments)
        etcd = shutil.which("etcd")
        if etcd is None:
            raise ClusterError("etcd is missing: install the package etcd-server")
        commands = {
            "etcd": control_plane.etcd(layout, Path(etcd)),
            "containerd": node.containerd(layout, found["containerd"]),
            "kube-apiserver": control_plane.apiserver(layout, found["kube-apiserver"], arguments),
            "kube-controller-manager": control_plane.controller_manager(
                layout, found["kube-controller-manager"], arguments
            ),
            "kube-scheduler": control_plane.scheduler(layout, found["kube-scheduler"], arguments),
            "kubelet": node.kubelet(layout, found["kubelet"]),
            "kube-proxy": node.proxy(layout, found["kube-proxy"]),
            "coredns": control_plane.coredns(layout, found["coredns"]),
        }
        (layout.config / "commands.json").write_text(json.dumps(commands, indent=2))
        self._bring_up(commands)

    def _bring_up(self, commands: Mapping[str, Sequence[str]]) -> None:
        watched: list[processes.Spawned] = []

        def spawn(*names: str) -> None:
            watched.extend(processes.spawn(self.layout, name, commands[name]) for name in names)

        def wait(what: str, deadline_s: float, *kubectl: str) -> None:
            processes.wait_until(what, lambda: self._kubectl(*kubectl).returncode == 0, deadline_s, watched)

        spawn("etcd", "containerd", "kube-apiserver")
        watched.append(self._spawn_relay())
        wait("the API server is ready", 90, "get", "--raw", "/readyz")
        spawn("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
        processes.wait_until("containerd listens", self.layout.containerd_socket.exists, 30, watched)
        images.load_pause(self.layout)
        self.kubectl("apply", "-f", "-", stdin=json.dumps(system_objects(self.layout)))
        spawn("coredns")
        wait("the node is registered", 60, "get", "node", self.layout.node)
        wait(
            "the node is Ready",
            60,
            "wait",
            "--for=condition=Ready",
            f"node/{self.layout.node}",
            "--timeout=1s",
        )
        ready = network.inside(self.layout, ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8181"])
        processes.wait_until(
            "CoreDNS is ready",
            lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0,
            30,
            watched,
        )
        wait("the default service account exists", 30, "get", "serviceaccount", "default", "-n", "default")

    def _spawn_relay(self) -> processes.Spawned:
        """Start the relay, and say in the kubeconfig where it is.

        It inherits its socket, which listens: so nobody else gets the port before it is served.
        """
        layout = self.layout
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            port, descriptor = listener.getsockname()[1], listener.fileno()
            kubeconfig.write(layout, layout.kubeconfig, "admin", f"https://127.0.0.1:{port}")
            route = f"{descriptor}:{layout.node_ip}:{layout.apiserver_port}"
            module = [sys.executable, "-m", "e2e.cluster.relay", layout.name, route]
            command = ["env", f"PYTHONPATH={ROOT}", *module]
            return processes.spawn(layout, "relay", command, on_host=True, inherited=[descriptor])

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [programs.find("kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            env=os.environ | {"KUBECACHEDIR": str(self.layout.state / "kubectl-cache")},
            capture_output=True,
            text=True,
            check=False,
        )

    def _clean(self) -> None:
        leftovers.clean(self.layout)

    def _keep_logs(self) -> None:
        kept = Path(tempfile.gettempdir()) / f"mooncake-cluster-{self.layout.name}-logs"
        shutil.rmtree(kept, ignore_errors=True)
        if self.layout.logs.exists():
            shutil.copytree(self.layout.logs, kept)

    def _changing(self) -> AbstractContextManager[None]:
        """Nobody else starts or stops this cluster meanwhile."""
        return alone(self.layout.lock, f"another process is starting or stopping cluster {self.layout.name}")
