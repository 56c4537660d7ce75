"""Brings the objects of a cluster, Pods apart, to what is desired, and removes those that are no longer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mooncake_operator.control.credentials import encoded
from mooncake_operator.control.gather import CLUSTER_LABEL, World
from mooncake_operator.control.inline import declare_replicas, without_replicas
from mooncake_operator.control.problems import finding_of
from mooncake_operator.control.together import together
from mooncake_operator.kube.applier import Applier, NameTakenError
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import KubeError
from mooncake_operator.kube.resources import (
    Object,
    Resource,
    controller_uid,
    is_terminating,
    name_of,
    owned_by,
    resource_of,
    uid_of,
)
from mooncake_operator.planning import DesiredWorld
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.manifests.disruption import with_something_to_protect
from mooncake_operator.planning.manifests.services import still_looked_up

_REFERRED_TO = frozenset({"Secret", "ConfigMap"})
_PRUNED = ("Service", "ConfigMap", "Secret", "Deployment", "PodDisruptionBudget", "NetworkPolicy")


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    live: dict[tuple[str, str], Object] = field(default_factory=dict)
    """Objects as they now are, by kind and name."""
    findings: list[Finding] = field(default_factory=list)


class ObjectKeeper:
    """Applies and prunes for one cluster at a time."""

    def __init__(
        self,
        client: Client,
        applier: Applier,
        cluster: Object,
        world: World,
        *,
        wrote: Callable[[Resource], None] = lambda kind: None,
    ) -> None:
        """Take the cluster and its world, as gathered; `wrote` is told what is no longer as read."""
        self._client = client
        self._applier = applier
        self._cluster = cluster
        self._world = world
        self._wrote = wrote
        self.outcome = Outcome()

    async def keep(self, desired: Sequence[Object]) -> None:
        """Apply objects, those first that others refer to; a refusal of one does not keep the others back.

        Raises:
            KubeError: the API server has trouble of its own; the pass is to be repeated.
            NamespaceEndsError: nothing can be made any more.
        """
        for first in (True, False):
            stage = [obj for obj in desired if (obj["kind"] in _REFERRED_TO) is first]
            await self._all(stage, self._ensure_plain)

    async def keep_pools(self, desired: Sequence[Object]) -> None:
        """Apply the inline pools, forced, and take over what their authors say of replicas."""
        await self._all(desired, self._ensure_pool)

    async def keep_and_prune(
        self, desired: DesiredWorld, pods: Sequence[Object], *, besides: Iterable[Object]
    ) -> None:
        """Keep all that is desired but Pods and pools, then prune.

        Args:
            desired: the cluster's world.
            pods: the cluster's, as they are.
            besides: what is kept by others and must not be pruned.

        Raises:
            KubeError: as `keep`.
            NamespaceEndsError: as `keep`.
        """
        owned = self._world.owned or {}
        there = {name for kind, name in owned if kind == "PodDisruptionBudget"}
        plain = [
            *desired.secrets,
            *desired.config_maps,
            *desired.services,
            *desired.network_policies,
            *with_something_to_protect(desired.disruption_budgets, pods, there),
            *desired.deployments,
        ]
        await self.keep(plain)
        in_use = still_looked_up((obj for (kind, _), obj in owned.items() if kind == "Service"), pods)
        await self.prune([*plain, *in_use, *besides])

    async def prune(self, desired: Iterable[Object]) -> None:
        """Delete this cluster's objects that are not desired; its own are those whose owner has its uid.

        A refusal of one does not keep the others.

        Raises:
            KubeError: as `keep`.
        """
        wanted = {(obj["kind"], name_of(obj)) for obj in desired}
        present = [obj for obj in (self._world.owned or {}).values() if obj["kind"] in _PRUNED]
        for live in (*present, *self._world.pools):
            if (live["kind"], name_of(live)) not in wanted and not is_terminating(live):
                await self._remove(live)

    async def _remove(self, live: Object) -> None:
        try:
            await self._applier.remove(live, uid_of(self._cluster))
        except KubeError as error:
            self.outcome.findings.append(finding_of(error, f"deleting {live['kind']} {name_of(live)}"))
        else:
            self._wrote(resource_of(live))

    async def _all(self, desired: Sequence[Object], ensure: Callable[[Object], Awaitable[Object]]) -> None:
        # In the order of the objects, not of the answers: a condition's words are not to change by chance.
        for kept in await together(self._one(obj, ensure) for obj in desired):
            if isinstance(kept, Finding):
                self.outcome.findings.append(kept)
                continue
            place = kept["kind"], name_of(kept)
            self.outcome.live[place] = kept
            if self._world.find(*place) is not kept:
                self._wrote(resource_of(kept))

    @staticmethod
    async def _one(desired: Object, ensure: Callable[[Object], Awaitable[Object]]) -> Object | Finding:
        try:
            return await ensure(desired)
        except (KubeError, NameTakenError) as error:
            return finding_of(error, f"{desired['kind']} {name_of(desired)}")

    async def _ensure_plain(self, desired: Object) -> Object:
        meant = owned_by(encoded(desired), self._cluster)
        live = self._world.find(desired["kind"], name_of(desired))
        return await self._applier.ensure(meant, live, uid_of(self._cluster))

    async def _ensure_pool(self, desired: Object) -> Object:
        labelled = {**desired["metadata"].get("labels", {}), CLUSTER_LABEL: name_of(self._cluster)}
        meant = owned_by(without_replicas(desired), self._cluster)
        meant = {**meant, "metadata": {**meant["metadata"], "labels": labelled}}
        live = next((pool for pool in self._world.pools if self._is(pool, desired)), None)
        if live is not None and is_terminating(live) and controller_uid(live) == uid_of(self._cluster):
            # It comes back once it is gone: its name is not free before.
            return live
        kept = await self._applier.ensure(meant, live, uid_of(self._cluster), force=True)
        return await declare_replicas(self._client, desired, kept)

    @staticmethod
    def _is(pool: Object, desired: Object) -> bool:
        return pool["kind"] == desired["kind"] and name_of(pool) == name_of(desired)
