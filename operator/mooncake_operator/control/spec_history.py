"""Keeps the history of specs: one ControllerRevision for each that a cluster, or a pool of its own, had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake_core.api import MooncakeCluster
from mooncake_core.api.base import ApiModel
from mooncake_operator.control.gather import World
from mooncake_operator.control.problems import finding_of
from mooncake_operator.kube.applier import MANAGER
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import AlreadyExistsError, KubeError, NotFoundError, PreconditionError
from mooncake_operator.kube.resources import CONTROLLER_REVISION, Object, controller_uid, name_of, uid_of
from mooncake_operator.planning.actions import Finding
from mooncake_operator.planning.manifests.plan import Plan
from mooncake_operator.planning.spec_revisions import SPEC_LABEL, history_of


async def keep_history(
    client: Client,
    world: World,
    plan: Plan,
    cluster: Object,
    read: MooncakeCluster,
    pools: Mapping[str, Object],
) -> list[Finding]:
    """Record the present specs, and forget those that are too old; returns what a user must mend first.

    Args:
        client: the API server.
        world: as gathered.
        plan: of the cluster.
        cluster: the live cluster.
        read: the same, checked.
        pools: live pools by name, of which those count that were written on their own.

    Raises:
        KubeError: the API server has trouble, or somebody else wrote meanwhile: try again.
    """
    known = [obj for (kind, _), obj in (world.owned or {}).items() if kind == CONTROLLER_REVISION.kind]
    written: list[tuple[Object, ApiModel]] = [(cluster, read.spec)]
    specs: dict[str, ApiModel] = {pool.name: pool.spec for pool in plan.engine_pools}
    if plan.store is not None:
        specs[plan.store.name] = plan.store.spec
    for name, spec in specs.items():
        live = pools.get(name)
        if live is not None and controller_uid(live) != uid_of(cluster):
            written.append((live, spec))
    findings = []
    for owner, spec in written:
        try:
            await _keep(client, plan, owner, spec, [r for r in known if _is_of(r, owner)])
        except KubeError as error:
            findings.append(finding_of(error, f"the history of {owner['kind']} {name_of(owner)}"))
    return findings


def _is_of(revision: Object, owner: Object) -> bool:
    labelled = SPEC_LABEL in (revision["metadata"].get("labels") or {})
    return labelled and controller_uid(revision) == uid_of(owner)


async def _keep(client: Client, plan: Plan, owner: Object, spec: ApiModel, own: Sequence[Object]) -> None:
    history = history_of(plan, owner, spec, own)
    for revision in history.forget:
        await _delete(client, plan.namespace, revision)
    if history.record is not None:
        await _create(client, plan.namespace, history.record, owner)


async def _delete(client: Client, namespace: str, revision: Object) -> None:
    try:
        await client.delete(CONTROLLER_REVISION, namespace, name_of(revision), uid=uid_of(revision))
    except (NotFoundError, PreconditionError):
        return


async def _create(client: Client, namespace: str, record: Object, owner: Object) -> None:
    try:
        await client.create(record, manager=MANAGER)
    except AlreadyExistsError:
        live = await client.get(CONTROLLER_REVISION, namespace, name_of(record))
        if controller_uid(live) != uid_of(owner):
            raise  # of an earlier object of this name: it is on its way out
