"""What is wanted of a cluster's pools, in the numbers that planning needs."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_core.api.coordination import PoolRatio
from mooncake_core.registry import Role
from mooncake_operator.planning.names import member_pod

STEMS = {Role.PREFILL: "p", Role.DECODE: "d", Role.STORE: "kv"}
"""What stands between a pool's name and an instance's number."""


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """One pool; counts are of instances unless a name says Pods.

    A store's masters and the managed Redis are planned as pools of their own.
    """

    name: str
    uid: str
    """Of the object that controls its Pods."""
    role: Role
    replicas: int
    revision: str
    pairing: str = ""
    size: int = 1
    """Pods of one instance of the newest revision."""
    gpus_per_pod: int = 0
    max_surge: int = 1
    max_unavailable: int = 1
    partition: int = 0
    """Instances that stay at the old revision."""
    paused: bool = False
    min_available: int = 0
    drain_timeout_s: int = 600
    join_interval_s: int = 0
    """Seconds between two joins of a store's nodes: an empty one draws all writes to itself."""
    deleted_s: float | None = None
    """When deletion was asked for."""
    has_finalizer: bool = True
    stem: str = ""
    """Begin of its instances' names; left out: the pool's name and a letter for the role."""
    generation: int = 0

    @property
    def gated(self) -> bool:
        """Whether schedulers must know an instance before it counts."""
        return self.role is not Role.STORE

    @property
    def gpus(self) -> int:
        """GPUs of one instance of the newest revision."""
        return self.size * self.gpus_per_pod

    @property
    def updated_target(self) -> int:
        """Instances that are to have the newest revision."""
        return max(self.replicas - self.partition, 0)

    def instance(self, ordinal: int) -> str:
        """Name of an instance, and of its leading Pod."""
        return f"{self._stem}-{ordinal}"

    def ordinal(self, instance: str) -> int | None:
        """The number in an instance's name; None when the name is not this pool's."""
        stem, _, number = instance.rpartition("-")
        return int(number) if stem == self._stem and number.isdecimal() else None

    @property
    def _stem(self) -> str:
        return self.stem or f"{self.name}-{STEMS[self.role]}"

    def pod(self, instance: str, rank: int) -> str:
        """Name of one of an instance's Pods."""
        return member_pod(instance, rank)


@dataclass(frozen=True, slots=True)
class DesiredCluster:
    """The pools of one cluster and what they owe each other."""

    pools: tuple[DesiredPool, ...]
    uid: str = ""
    """Of the MooncakeCluster; empty = what it owns itself is not known to be wanted or not."""
    max_skew: float = 0.25
    """How far one pool may be ahead of another, as a share; one instance ahead is always allowed."""
    ratio: PoolRatio | None = None
    gpu_budget: int | None = None
    progress_deadline_s: float = 1800.0
    protocol: str = "TCP"
    """What KV travels over: `network.protocol`."""

    def pool(self, name: str) -> DesiredPool:
        """A pool by name.

        Raises:
            KeyError: there is none.
        """
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)
