"""From a cluster to its desired world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mooncake_core.api import MooncakeCluster, Pool
from mooncake_operator.planning.manifests.disruption import disruption_budgets
from mooncake_operator.planning.manifests.engine import STORE_CONFIG, engine_pods
from mooncake_operator.planning.manifests.network import network_policies
from mooncake_operator.planning.manifests.objects import Object, config_map
from mooncake_operator.planning.manifests.plan import (
    Credentials,
    Images,
    Plan,
    Present,
    inline_pools,
    plan_of,
)
from mooncake_operator.planning.manifests.redis import redis_objects
from mooncake_operator.planning.manifests.scheduler import (
    admin_secret,
    scheduler_config_map,
    scheduler_deployment,
    scheduler_pods,
)
from mooncake_operator.planning.manifests.services import services
from mooncake_operator.planning.manifests.store import store_pods
from mooncake_operator.planning.manifests.transfer import store_client_config
from mooncake_operator.planning.names import Names, TemplateNames


@dataclass(frozen=True, slots=True)
class DesiredWorld:
    """Everything that should exist for one cluster, as plain Kubernetes objects."""

    pools: tuple[Object, ...]
    """Pool objects of the inline entries."""
    pods: tuple[Object, ...]
    """Pods that the operator owns itself: engines, store, Redis."""
    deployments: tuple[Object, ...]
    scheduler_pods: tuple[Object, ...]
    """The Pods that the Deployments stand for, where nothing else expands them."""
    services: tuple[Object, ...]
    config_maps: tuple[Object, ...]
    secrets: tuple[Object, ...]
    disruption_budgets: tuple[Object, ...] = ()
    network_policies: tuple[Object, ...] = ()

    def for_kubernetes(self) -> Iterator[Object]:
        """Objects to create on Kubernetes, those first that others refer to."""
        yield from (*self.secrets, *self.config_maps, *self.services, *self.pools)
        yield from (*self.network_policies, *self.disruption_budgets)
        yield from (*self.pods, *self.deployments)

    def for_one_machine(self) -> Iterator[Object]:
        """Objects of a runtime that knows Pods and what they mount, and no controllers."""
        yield from (*self.secrets, *self.config_maps)
        yield from (*self.pods, *self.scheduler_pods)


def render(
    cluster: MooncakeCluster,
    names: Names,
    pools: Sequence[Pool] = (),
    *,
    images: Images | None = None,
    credentials: Credentials | None = None,
    present: Mapping[str, Sequence[Present]] | None = None,
) -> DesiredWorld:
    """Work out the desired world; the same input gives the same output, on any machine.

    Args:
        cluster: a checked cluster.
        names: addresses and ports; see `ClusterNames` and `LocalNames`.
        pools: pool objects written on their own that refer to this cluster.
        images: images of the product's own containers.
        credentials: secrets made by the caller; a managed Redis needs its password.
        present: engine instances that are there, by pool, where they may differ from those wanted. Only
            clusters without Redis need it, whose schedulers read the instances from a file.

    Raises:
        ValueError: pools and cluster contradict each other, or a password is missing.
        KeyError: `LocalNames` knows no ports for one of `pod_names`.
    """
    plan = plan_of(
        cluster,
        names,
        pools,
        images=images or Images(),
        credentials=credentials or Credentials(),
        present=present,
    )
    return render_plan(plan)


def render_plan(plan: Plan, *, with_pods: bool = True) -> DesiredWorld:
    """The desired world of a plan.

    Args:
        plan: made by `plan_of`.
        with_pods: leave the Pods out where each is made from its pool's ControllerRevision instead.

    Raises:
        ValueError: a password is missing.
        KeyError: as `render`.
    """
    redis_pods, redis_services, redis_secrets = redis_objects(plan)
    return DesiredWorld(
        pools=tuple(pool.manifest() for pool in inline_pools(plan.cluster)),
        pods=(*redis_pods, *_pods(plan)) if with_pods else (),
        deployments=(scheduler_deployment(plan),),
        scheduler_pods=tuple(scheduler_pods(plan)) if with_pods else (),
        services=(*services(plan), *redis_services),
        config_maps=(scheduler_config_map(plan), *_engine_config_maps(plan)),
        secrets=(*redis_secrets, *admin_secret(plan)),
        disruption_budgets=tuple(disruption_budgets(plan)),
        network_policies=tuple(network_policies(plan)),
    )


def _pods(plan: Plan) -> Iterator[Object]:
    if plan.store is not None:
        yield from store_pods(plan, plan.store)
    for pool in plan.engine_pools:
        yield from engine_pods(plan, pool)


def pod_names(cluster: MooncakeCluster, pools: Sequence[Pool] = ()) -> list[str]:
    """Names of all Pods that `render` will give, schedulers' included: each needs a port block locally."""
    return plan_of(cluster, TemplateNames(), pools, images=Images(), credentials=Credentials()).pods()


def _engine_config_maps(plan: Plan) -> list[Object]:
    if plan.store is None:
        return []
    return [config_map(plan, f"{plan.name}-engine", "engine", {STORE_CONFIG: store_client_config(plan)})]
