"""Instances of several Pods: who leads, where the others find it, how they stay together and end together.

Flags as of vLLM 0.32 (`vllm serve --nnodes … --headless`, multiprocessing executor): the process of node rank
0 schedules and answers HTTP, the others only compute what it tells them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_core.api.pods import Scheduling
from mooncake_operator.planning.manifests.objects import CLUSTER_LABEL, POOL_LABEL, RANK_LABEL, Object, env
from mooncake_operator.planning.manifests.plan import EnginePoolPlan, Plan
from mooncake_operator.planning.manifests.pods import spread
from mooncake_operator.planning.names import Port, member_pod

SIZE = "MOONCAKE_INSTANCE_SIZE"
RANK = "MOONCAKE_INSTANCE_RANK"
LEADER_ADDRESS = "MOONCAKE_LEADER_ADDRESS"

_BE_EMPTIED = """\
from urllib.request import Request, urlopen
try:
    urlopen(Request({url!r}, method="POST"), timeout={timeout_s})
except OSError:
    pass
"""
_UNTIL_LEADER_ENDS = """\
import socket, time
until = time.monotonic() + {timeout_s}
try:
    address = socket.getaddrinfo({host!r}, {port})[0][4]
    while time.monotonic() < until:
        socket.create_connection(address[:2], timeout=5).close()
        time.sleep(0.5)
except OSError:
    pass
"""


@dataclass(frozen=True, slots=True)
class Member:
    """One Pod of an instance."""

    instance: str
    rank: str = "0"
    """Its number, or a placeholder for a worker's."""

    @property
    def leads(self) -> bool:
        """Whether it is the Pod that clients are sent to."""
        return self.rank == "0"

    @property
    def pod(self) -> str:
        """The Pod's name."""
        return member_pod(self.instance, self.rank)


def members(pool: EnginePoolPlan) -> list[Member]:
    """All Pods of a pool, the leader of each instance first."""
    ranks = range(pool.spec.instance.size)
    return [Member(instance, str(rank)) for instance in pool.instances() for rank in ranks]


def leader_address(plan: Plan, pool: EnginePoolPlan, member: Member) -> str:
    """Where the Pods of an instance reach its leader, ready or not: by the headless Service."""
    return plan.names.pod_host(member.instance, pool.name, plan.namespace)


def group_arguments(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[str]:
    """What ties the engine processes of one instance together; nothing for an instance of one Pod."""
    size = pool.spec.instance.size
    if size == 1:
        return []
    return [
        *("--nnodes", str(size)),
        *("--node-rank", member.rank),
        *("--master-addr", leader_address(plan, pool, member)),
        *("--master-port", str(plan.names.port(member.instance, Port.GROUP))),
        # Else vLLM might look for a Ray cluster.
        *("--distributed-executor-backend", "mp"),
    ]


def group_environment(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[Object]:
    """Size, rank and leader for whoever wants them, e.g. a container of the user's."""
    size = pool.spec.instance.size
    if size == 1:
        return []
    address = leader_address(plan, pool, member)
    return [env(SIZE, str(size)), env(RANK, member.rank), env(LEADER_ADDRESS, address)]


def placement(scheduling: Scheduling, own_labels: dict[str, str], member: Member) -> Object:
    """Instances are spread over the domains of a node label, the Pods of each are kept inside one.

    Only leaders are spread and counted: counting Pods would pull the Pods of an instance apart.
    """
    key = scheduling.spread_topology_key
    if key is not None and not member.leads:
        return {"affinity": {"podAffinity": _near_leader(own_labels, key)}}
    return spread(scheduling, own_labels, CLUSTER_LABEL, POOL_LABEL, RANK_LABEL)


def _near_leader(own_labels: dict[str, str], key: str) -> Object:
    """A wish, not a condition: the domain may be one node, too small for a whole instance."""
    leader = {"mooncake.io/instance": own_labels["mooncake.io/instance"], RANK_LABEL: "0"}
    selector = {"matchLabels": leader}
    term = {"weight": 100, "podAffinityTerm": {"labelSelector": selector, "topologyKey": key}}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [term]}


def worker_pre_stop(plan: Plan, pool: EnginePoolPlan, member: Member) -> list[str]:
    """What holds a worker until its instance has nothing to do: without one of its Pods it can do nothing.

    `kubectl drain` may take a worker's node and not the leader's. With a sidecar the leader is emptied at its
    request; without one, the leader's own end is the drain, and a worker ends after it.
    """
    host, timeout_s = leader_address(plan, pool, member), pool.spec.drain.timeout_seconds
    if plan.shares_state:
        url = f"http://{host}:{plan.names.port(member.instance, Port.SIDECAR)}/drain"
        return ["python", "-c", _BE_EMPTIED.format(url=url, timeout_s=timeout_s)]
    port = plan.names.port(member.instance, Port.ENGINE)
    return ["python", "-c", _UNTIL_LEADER_ENDS.format(host=host, port=port, timeout_s=timeout_s)]
