"""Names, addresses and folders of one cluster."""

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

_MARKER = "MOONCAKE_TEST_CLUSTER"


@dataclass(frozen=True)
class Layout:
    """Everything about a cluster that follows from its name.

    Addresses are the same in every cluster: each lives in a network namespace of its own.
    """

    name: str = "e2e"

    node_ip = "10.77.0.1"
    node_cidr = "10.77.0.1/24"
    gateway = "10.77.0.2"
    pod_cidr = "10.88.0.0/16"
    service_cidr = "10.96.0.0/16"
    apiserver_service_ip = "10.96.0.1"
    dns_service_ip = "10.96.0.10"
    dns_domain = "cluster.local"
    apiserver_port = 6443

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isalnum() and self.name.islower() and len(self.name) <= 12):
            raise ClusterError(
                f"{self.name!r} cannot name a cluster: write up to 12 lower-case letters and digits"
            )

    @property
    def state(self) -> Path:
        """All files of the cluster. Short, because socket paths are limited to 107 bytes."""
        return Path("/var/lib/mooncake-clusters") / self.name

    @property
    def lock(self) -> Path:
        return self.state.parent / f".{self.name}.lock"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def kubelet(self) -> Path:
        return self.state / "kubelet"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd.sock"

    @property
    def kubeconfig(self) -> Path:
        """For programs on the host; reaches the API server through the relay."""
        return self.state / "kubeconfig"

    @property
    def machine(self) -> Path:
        """What this cluster changed on the machine."""
        return self.state / "machine.json"

    @property
    def network_namespace(self) -> str:
        return f"mooncake-{self.name}"

    @property
    def network_namespace_path(self) -> Path:
        return Path("/run/netns") / self.network_namespace

    @property
    def cni_network(self) -> str:
        return f"mooncake-{self.name}"

    @property
    def cgroup(self) -> str:
        """Pods live below this cgroup, in each hierarchy."""
        return f"mooncake-{self.name}"

    @property
    def node(self) -> str:
        return f"{self.name}-node"

    @property
    def marker(self) -> dict[str, str]:
        """In the environment of every process that is started, and so of all that these start.

        Found again by it, whatever died in between; a file of process ids can miss the last one.
        """
        return {_MARKER: self.name}
