"""The network namespace that a cluster lives in.

The host's network is left alone, and nothing in the cluster reaches out. ``ip netns exec`` would hide the
cgroup mounts from the kubelet (it mounts /sys anew), so processes enter through ``nsenter``.
"""

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Sequence

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

_CLONE_NEWNET = 0x40000000


def create(layout: Layout) -> None:
    """Make the namespace, with a bridge that has the node's address and a default route.

    CNI and kube-proxy want a default route to exist; the bridge gets a veth pair, or it has no carrier.
    """
    name = layout.network_namespace
    _ip("netns", "add", name)
    for command in (
        "link set lo up",
        "link add node0 type bridge",
        f"addr add {layout.node_cidr} dev node0",
        "link add node0-port type veth peer name node0-peer",
        "link set node0-port master node0",
        "link set node0-port up",
        "link set node0-peer up",
        "link set node0 up",
        f"route add default via {layout.gateway} dev node0",
    ):
        _ip("-n", name, *command.split())
    _run(inside(layout, ["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]))


def delete(layout: Layout) -> None:
    """Remove the namespace; its devices, rules and routes go with it."""
    if layout.network_namespace_path.exists():
        _ip("netns", "delete", layout.network_namespace)


def inside(layout: Layout, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in the cluster's network."""
    return ["nsenter", f"--net={layout.network_namespace_path}", "--", *command]


def socket_inside(layout: Layout, family: int = socket.AF_INET) -> socket.socket:
    """A TCP socket that belongs to the cluster's network, for a process outside it.

    A socket stays in the network it was made in. A thread of its own enters, so that no other one ever does.
    """
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            with layout.network_namespace_path.open() as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    error = ctypes.get_errno()
                    raise OSError(error, os.strerror(error))
            made.append(socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise ClusterError(f"cannot enter the network of cluster {layout.name}: {made[0]}") from made[0]
    return made[0]


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise ClusterError(f"`{' '.join(command)}` failed: {ran.stderr.strip()}")
