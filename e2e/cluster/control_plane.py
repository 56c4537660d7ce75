"""Command lines of the control plane: etcd, API server, controllers, scheduler, DNS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster import kubeconfig
from e2e.cluster.layout import Layout

Command = list[str]

DEFAULT_ARGUMENTS: Mapping[str, Sequence[str]] = {
    # A node that is gone is noticed, and its Pods are, within a test's patience. The kubelet's heartbeat is
    # every 3 s (node.py); a machine under load may miss some.
    "kube-apiserver": (
        "--default-not-ready-toleration-seconds=5",
        "--default-unreachable-toleration-seconds=5",
    ),
    "kube-controller-manager": (
        "--node-monitor-grace-period=20s",
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
    ),
    "kube-scheduler": ("--kube-api-qps=1000", "--kube-api-burst=2000"),
}


@dataclass(frozen=True)
class Arguments:
    """Arguments added to those a program needs, by the program's name; the last one of a flag counts."""

    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, program: str) -> list[str]:
        return [*DEFAULT_ARGUMENTS.get(program, ()), *self.extra.get(program, ())]


def etcd(layout: Layout, program: Path) -> Command:
    """Without fsync: a test cluster need not survive a power cut."""
    return [
        str(program),
        "--name=node",
        f"--data-dir={layout.state / 'etcd'}",
        "--unsafe-no-fsync",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        "--initial-cluster=node=http://127.0.0.1:2380",
        "--auto-compaction-retention=5m",
        "--quota-backend-bytes=4294967296",
    ]


def apiserver(layout: Layout, program: Path, arguments: Arguments) -> Command:
    """The API server listens on the node's address and on the namespace's loopback."""
    pki = layout.pki
    return [
        str(program),
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        f"--secure-port={layout.apiserver_port}",
        f"--advertise-address={layout.node_ip}",
        f"--service-cluster-ip-range={layout.service_cidr}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--service-account-key-file={pki / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        f"--service-account-issuer=https://kubernetes.default.svc.{layout.dns_domain}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        # Otherwise exec and logs try to resolve the node's name.
        "--kubelet-preferred-address-types=InternalIP",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        *arguments.of("kube-apiserver"),
    ]


def controller_manager(layout: Layout, program: Path, arguments: Arguments) -> Command:
    pki = layout.pki
    return [
        str(program),
        f"--kubeconfig={_kubeconfig(layout, 'controller-manager')}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        f"--service-account-private-key-file={pki / 'service-account.key'}",
        f"--service-cluster-ip-range={layout.service_cidr}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        *arguments.of("kube-controller-manager"),
    ]


def scheduler(layout: Layout, program: Path, arguments: Arguments) -> Command:
    return [
        str(program),
        f"--kubeconfig={_kubeconfig(layout, 'scheduler')}",
        "--leader-elect=false",
        *arguments.of("kube-scheduler"),
    ]


def coredns(layout: Layout, program: Path) -> Command:
    """The cluster's names only: the cluster reaches nothing outside, so there is nobody to forward to."""
    corefile = layout.config / "Corefile"
    corefile.write_text(
        f""".:53 {{
    bind {layout.node_ip}
    errors
    health 127.0.0.1:8180
    ready 127.0.0.1:8181
    kubernetes {layout.dns_domain} in-addr.arpa {{
        kubeconfig {_kubeconfig(layout, "dns")}
        pods insecure
        ttl 5
    }}
}}
"""
    )
    return [str(program), "-conf", str(corefile)]


def _kubeconfig(layout: Layout, client: str) -> Path:
    path = layout.config / f"{client}.kubeconfig"
    kubeconfig.write(layout, path, client, f"https://{layout.node_ip}:{layout.apiserver_port}")
    return path
