"""From a manifest file to a world that this machine can run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_core.api import ManifestError, MooncakeCluster, Pool, load_manifests
from mooncake_operator.planning import Credentials, LocalNames, Port, pod_names, render
from mooncakectl.local.errors import LocalRuntimeError
from mooncakectl.local.ports import PortBlocks
from mooncakectl.local.runtime import PodStatus
from mooncakectl.local.world import World

COMPONENT_LABEL = "app.kubernetes.io/component"
# Who ends when: schedulers finish their streams while the engines still stand, engines put into a store that
# still answers, and Redis outlives all that say goodbye to it.
_STOP_ORDER = {"scheduler": 0, "prefill": 1, "decode": 1, "store-node": 2, "store-master": 3, "redis": 4}
_STOP_LAST = 3


@dataclass(frozen=True, slots=True)
class Definition:
    """What a manifest file says about one cluster."""

    cluster: MooncakeCluster
    pools: tuple[Pool, ...]
    plain: tuple[dict[str, Any], ...]
    """Its Secrets and ConfigMaps."""

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.cluster.metadata.name

    @property
    def model(self) -> str:
        """What clients ask for."""
        return self.cluster.spec.model.name

    @property
    def wants_key(self) -> bool:
        """Whether clients need an API key."""
        return self.cluster.spec.scheduler.auth.api_key_secret_ref is not None

    @property
    def time_scale(self) -> float:
        """Model seconds per wall second."""
        return self.cluster.spec.engine.time_scale


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A cluster with addresses on this machine."""

    definition: Definition
    world: World
    endpoint: str
    """Base URL of the OpenAI server."""
    admin_urls: tuple[str, ...]
    """Base URL of each scheduler's admin port."""


def read_definition(file: Path) -> Definition:
    """Read a manifest file with exactly one MooncakeCluster.

    Raises:
        ManifestError: the file is wrong, or has no cluster or several.
    """
    objects = load_manifests(file)
    clusters = [item for item in objects if isinstance(item, MooncakeCluster)]
    if len(clusters) != 1:
        problem = (
            "no MooncakeCluster; add one"
            if not clusters
            else "more than one MooncakeCluster; give each a file"
        )
        raise ManifestError([f"{file}: {problem}"])
    plain = tuple(item for item in objects if isinstance(item, dict))
    pools = tuple(item for item in objects if not isinstance(item, (dict, MooncakeCluster)))
    return Definition(clusters[0], pools, plain)


def plan_local(
    definition: Definition, blocks: PortBlocks, *, serving_port: int, secrets_dir: Path | None = None
) -> LocalCluster:
    """Give every Pod its ports and render the world.

    Args:
        definition: the cluster.
        blocks: gives the ports of its Pods.
        serving_port: where clients reach it; must be held, so that no block has it.
        secrets_dir: Secrets that the manifest file does not hold.

    Raises:
        LocalRuntimeError: there are no ports, a Secret cannot be read, or the pools contradict the cluster.
    """
    cluster, pools = definition.cluster, definition.pools
    try:
        names = LocalNames(
            {pod: blocks.base(pod) for pod in pod_names(cluster, pools=pools)}, serving=serving_port
        )
        desired = render(cluster, names, pools=pools, credentials=_credentials())
    except ValueError as error:
        raise LocalRuntimeError(str(error)) from error
    world = World.of([*desired.for_one_machine(), *definition.plain], secrets_dir=secrets_dir)
    _check_references(cluster, world)
    schedulers = [pod["metadata"]["name"] for pod in world.pods if component(pod["metadata"]) == "scheduler"]
    return LocalCluster(
        definition,
        world,
        endpoint=f"http://{names.host}:{serving_port}",
        admin_urls=tuple(f"http://{names.host}:{names.port(pod, Port.ADMIN)}" for pod in schedulers),
    )


def _check_references(cluster: MooncakeCluster, world: World) -> None:
    """A Secret without the key that is asked for would let the schedulers start again and again.

    Raises:
        LocalRuntimeError: says which key of which Secret, and what belongs there.
    """
    scheduler = cluster.spec.scheduler
    keys, redis = scheduler.auth.api_key_secret_ref, scheduler.redis and scheduler.redis.secret_ref
    wanted = [("auth.apiKeySecretRef", keys.name, keys.key, '{"NAME": "KEY", …} as JSON')] if keys else []
    if redis:
        wanted.append(("redis.secretRef", redis.name, "url", "redis://[user:password@]host[:port][/db]"))
    for field, name, key, form in wanted:
        if key not in world.secrets.get(name, {key: b""}):
            where = f"spec.scheduler.{field}: Secret {name} has no key {key}"
            raise LocalRuntimeError(f"{where}; write {form} into it")


def component(metadata: Mapping[str, Any]) -> str:
    """Which part of the product a Pod is, by its label."""
    return str((metadata.get("labels") or {}).get(COMPONENT_LABEL, ""))


def stop_wave(pod: PodStatus) -> int:
    """When a Pod stops, for `LocalRuntime.stop`."""
    return _STOP_ORDER.get(pod.labels.get(COMPONENT_LABEL, ""), _STOP_LAST)


def _credentials() -> Credentials:
    # The admin port of a local cluster is open: it listens on the loopback only.
    return Credentials(redis_password=secrets.token_hex(16))
