"""Configuration and command lines of the node: containerd, kubelet, kube-proxy."""

import json
import shutil
from pathlib import Path

import yaml

from e2e.cluster import kubeconfig
from e2e.cluster.control_plane import Command
from e2e.cluster.debian import CNI_DIR
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

PAUSE_IMAGE = "localhost/mooncake-e2e-pause:1"


def containerd(layout: Layout, program: Path) -> Command:
    """containerd 2 with everything it writes below the cluster's folder."""
    _write_cni(layout)
    path = layout.config / "containerd.toml"
    path.write_text(_containerd_config(layout))
    return [str(program), "--config", str(path)]


def kubelet(layout: Layout, program: Path) -> Command:
    path = layout.config / "kubelet.yaml"
    path.write_text(yaml.safe_dump(_kubelet_config(layout), sort_keys=False))
    credentials = layout.config / "kubelet.kubeconfig"
    kubeconfig.write(layout, credentials, "kubelet", f"https://{layout.node_ip}:{layout.apiserver_port}")
    return [
        str(program),
        f"--config={path}",
        f"--kubeconfig={credentials}",
        f"--node-ip={layout.node_ip}",
        f"--hostname-override={layout.node}",
        f"--root-dir={layout.kubelet}",
        f"--cert-dir={layout.kubelet / 'pki'}",
    ]


def proxy(layout: Layout, program: Path) -> Command:
    """The conntrack parameters cannot be written in a network namespace; 0 leaves them alone."""
    credentials = layout.config / "proxy.kubeconfig"
    kubeconfig.write(layout, credentials, "proxy", f"https://{layout.node_ip}:{layout.apiserver_port}")
    return [
        str(program),
        f"--kubeconfig={credentials}",
        f"--hostname-override={layout.node}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={layout.pod_cidr}",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
    ]


def _kubelet_config(layout: Layout) -> dict[str, object]:
    resolver = layout.config / "resolv.conf"
    resolver.write_text(f"nameserver {layout.node_ip}\n")
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(layout.pki / "kubelet-server.key"),
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "clusterDNS": [layout.dns_service_ip],
        "clusterDomain": layout.dns_domain,
        "resolvConf": str(resolver),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.cgroup}",
        "failCgroupV1": False,  # from 1.35 on a kubelet refuses v1 otherwise
        "failSwapOn": False,
        "enforceNodeAllocatable": ["pods"],
        # A full disk is no reason to evict a test's Pods or to delete the images it brought.
        "evictionHard": {},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeLeaseDurationSeconds": 12,
        "nodeStatusUpdateFrequency": "4s",
        "maxPods": 200,
        "registryPullQPS": 0,
        "podLogsDir": str(layout.state / "pod-logs"),
        "volumePluginDir": str(layout.kubelet / "volume-plugins"),
        "shutdownGracePeriod": "0s",
        "syncFrequency": "10s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "20s"},
    }


def _containerd_config(layout: Layout) -> str:
    runc = shutil.which("runc")
    if runc is None:
        raise ClusterError("runc is missing: install the package runc")
    state, run = layout.state / "containerd", layout.state / "run"
    # restrict_oom_score_adj: otherwise no sandbox starts without CAP_SYS_RESOURCE.
    return f"""version = 3
root = '{state}'
state = '{run}'

[grpc]
address = '{layout.containerd_socket}'

[ttrpc]
address = '{layout.containerd_socket}.ttrpc'

[plugins.'io.containerd.shim.v1.manager']
socket_dir = '{layout.state / "shims"}'

[plugins.'io.containerd.nri.v1.nri']
disable = true

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ['{CNI_DIR}']
conf_dir = '{layout.config / "cni"}'
use_internal_loopback = true

[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = 'runc'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = '{runc}'
SystemdCgroup = false
Root = '{layout.state / "runc"}'

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{PAUSE_IMAGE}'
"""


def _write_cni(layout: Layout) -> None:
    folder = layout.config / "cni"
    folder.mkdir(parents=True, exist_ok=True)
    network = {
        "cniVersion": "1.0.0",
        "name": layout.cni_network,
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods0",
                "isGateway": True,
                "ipMasq": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": layout.pod_cidr}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": str(layout.state / "ipam"),
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    (folder / "10-mooncake.conflist").write_text(json.dumps(network, indent=2))
