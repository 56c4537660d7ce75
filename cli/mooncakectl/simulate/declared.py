"""The cluster that a manifest declares, with all its pools, wherever they are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_core.api import (
    MooncakeCluster,
    MooncakeDecodePool,
    MooncakePrefillPool,
    Object,
    Pool,
    load_manifests,
    parse_manifests,
)
from mooncake_core.profiles import Profile


@dataclass(frozen=True, slots=True)
class Declared:
    """A cluster, and which of its pools are objects of their own."""

    cluster: MooncakeCluster
    """With those pools among its own."""
    apart: tuple[str, ...]
    """Kind and name of each."""


def declared_in(file: Path, text: str | None = None) -> Declared:
    """The one MooncakeCluster of a manifest.

    Args:
        file: the manifest, or a folder of them.
        text: what is in the file, where it was read already: a pipe can be read once only.

    Raises:
        ManifestError: the manifest is wrong.
        ValueError: it has no cluster, or several, or a pool of another one.
    """
    objects = load_manifests(file) if text is None else parse_manifests(text, file=str(file))
    clusters = [item for item in objects if isinstance(item, MooncakeCluster)]
    if len(clusters) != 1:
        raise ValueError(f"{file}: {len(clusters)} MooncakeClusters: give a manifest with one")
    pools = [item for item in objects if not isinstance(item, (dict, MooncakeCluster))]
    for pool in pools:
        if not _belongs(pool, clusters[0]):
            raise ValueError(
                f"{file}: {_called(pool)}: clusterRef is {pool.spec.cluster_ref.name}, the cluster is "
                f"{clusters[0].metadata.name}: give a manifest of one cluster"
            )
    return Declared(_together(clusters[0], pools), tuple(map(_called, pools)))


def remarks(cluster: MooncakeCluster, profile: Profile, *, named: bool) -> Iterator[str]:
    """What people should know of the figures that they will read.

    Args:
        cluster: what is simulated.
        profile: how fast a Pod of it is taken to be.
        named: whether that was asked for.
    """
    spec = cluster.spec
    if spec.engine.profile is None and not named:
        yield (
            f"no manifest tells how fast real engines are: simulated with {profile.name}; "
            "name other hardware and another model with --profile"
        )
    if spec.scheduler.routing.disaggregation_threshold_tokens:
        yield (
            "spec.scheduler.routing.disaggregationThresholdTokens is not simulated: every prompt goes to a "
            "prefill instance"
        )
    asked = [pool.resources.gpu for pool in (*spec.prefill_pools, *spec.decode_pools)]
    for count in sorted({gpu.count for gpu in asked if gpu is not None} - {profile.gpus}):
        yield (
            f"resources.gpu.count is {count}: such a Pod is simulated as the {profile.gpus} GPUs that "
            f"{profile.name} stands for; name a profile of {count} with --profile, if there is one"
        )


def _belongs(pool: Pool, cluster: MooncakeCluster) -> bool:
    same_namespace = pool.metadata.namespace == cluster.metadata.namespace
    return same_namespace and pool.spec.cluster_ref.name == cluster.metadata.name


def _together(cluster: MooncakeCluster, pools: Iterable[Pool]) -> MooncakeCluster:
    """The cluster with these pools as if they were its entries: what they have in common is what matters."""
    spec = cluster.spec
    fields: dict[str, list[Any]] = {
        "prefill_pools": list(spec.prefill_pools),
        "decode_pools": list(spec.decode_pools),
        "kv_cache_pools": list(spec.kv_cache_pools),
    }
    for pool in pools:
        # An entry is an object's spec with a name in place of the cluster's.
        fields[_field(pool)].append(pool.spec)
    return cluster.model_copy(update={"spec": spec.model_copy(update=fields)})


def _field(pool: Pool) -> str:
    if isinstance(pool, MooncakePrefillPool):
        return "prefill_pools"
    return "decode_pools" if isinstance(pool, MooncakeDecodePool) else "kv_cache_pools"


def _called(pool: Object) -> str:
    return f"{pool.kind} {pool.metadata.name}"
