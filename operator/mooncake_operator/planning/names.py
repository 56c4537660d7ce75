"""Where the Pods of a cluster are reached: by cluster DNS, or on this machine's loopback.

Each Pod has a block of 10 ports; what listens at which offset is `Port`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

BLOCK_PORTS = 10


class Port(IntEnum):
    """Offsets into a Pod's block of ports."""

    ENGINE = 0
    BOOTSTRAP = 1
    SIDE_CHANNEL = 2
    SIDECAR = 3
    EVENTS = 4
    REPLAY = 5
    GROUP = 6
    """Where the workers of an instance meet their leader."""
    SERVING = 0
    ADMIN = 1
    REDIS = 0
    MASTER_RPC = 0
    MASTER_HTTP = 1
    NODE_RPC = 0
    NODE_HTTP = 1


def member_pod(instance: str, rank: int | str) -> str:
    """Name of one of an instance's Pods: the leader's is the instance's, the first worker's `<instance>-w1`.

    At most 52 characters: 40 of the pool, the role's letter, 4 digits of the instance and 2 of the rank.
    """
    return instance if str(rank) == "0" else f"{instance}-w{rank}"


def instance_of_pod(pod: str) -> str:
    """The instance that a Pod of this name belongs to; for any other name, the name itself."""
    instance, mark, rank = pod.rpartition("-w")
    return instance if mark and rank.isdecimal() else pod


class Names(Protocol):
    """Decides addresses and ports, so that one rendering serves both runtimes."""

    @property
    def listen_host(self) -> str:
        """Address that servers bind."""

    @property
    def shares_files(self) -> bool:
        """Whether all Pods see the files of one machine."""

    @property
    def serving_port(self) -> int:
        """Port of the schedulers' OpenAI API, the same for all of a cluster."""

    @property
    def endpoints_lag_s(self) -> float:
        """How long after a Pod began to end new connections may still be led to it."""

    def port(self, pod: str, offset: Port) -> int:
        """A port of a Pod's block."""

    def pod_host(self, pod: str, subdomain: str, namespace: str) -> str:
        """Where other Pods reach this one, through the headless Service `subdomain`."""

    def service_host(self, service: str, namespace: str) -> str:
        """Where Pods reach a Service."""


@dataclass(frozen=True, slots=True)
class ClusterNames:
    """Kubernetes: each Pod has an address of its own, so that all blocks may begin at the same port."""

    base: int = 21_000
    domain: str = "svc"
    """What follows the namespace; `svc` is completed by the Pods' search path."""

    @property
    def listen_host(self) -> str:
        return "0.0.0.0"

    @property
    def shares_files(self) -> bool:
        return False

    @property
    def serving_port(self) -> int:
        return self.base + Port.SERVING

    @property
    def endpoints_lag_s(self) -> float:
        # EndpointSlices and kube-proxy follow within a second or two; load balancers outside take longer.
        return 10.0

    def port(self, pod: str, offset: Port) -> int:
        return self.base + offset

    def pod_host(self, pod: str, subdomain: str, namespace: str) -> str:
        return f"{pod}.{subdomain}.{namespace}.{self.domain}"

    def service_host(self, service: str, namespace: str) -> str:
        return f"{service}.{namespace}.{self.domain}"


@dataclass(frozen=True, slots=True)
class LocalNames:
    """One machine: all Pods share its loopback, so that each needs a block of its own.

    `bases` gives the first port of each Pod of `pod_names(cluster)`; `serving` must lie outside all blocks.
    """

    bases: Mapping[str, int]
    serving: int = 8000
    host: str = "127.0.0.1"

    @property
    def listen_host(self) -> str:
        return self.host

    @property
    def shares_files(self) -> bool:
        return True

    @property
    def serving_port(self) -> int:
        return self.serving

    @property
    def endpoints_lag_s(self) -> float:
        return 0.0

    def port(self, pod: str, offset: Port) -> int:
        return self.bases[pod] + offset

    def pod_host(self, pod: str, subdomain: str, namespace: str) -> str:
        return self.host

    def service_host(self, service: str, namespace: str) -> str:
        return self.host


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """Nowhere: the same for every Pod and runtime, so that a revision depends on the template alone."""

    @property
    def listen_host(self) -> str:
        return "listen"

    @property
    def shares_files(self) -> bool:
        return False

    @property
    def serving_port(self) -> int:
        return 1

    @property
    def endpoints_lag_s(self) -> float:
        return 0.0

    def port(self, pod: str, offset: Port) -> int:
        return 1 + offset

    def pod_host(self, pod: str, subdomain: str, namespace: str) -> str:
        return "pod"

    def service_host(self, service: str, namespace: str) -> str:
        return service
