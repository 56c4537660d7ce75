"""Pure planning: desired specs in, desired objects out; no clock, no chance, no I/O."""

from mooncake_operator.planning.manifests.plan import Credentials, Images
from mooncake_operator.planning.manifests.render import DesiredWorld, pod_names, render, render_plan
from mooncake_operator.planning.names import BLOCK_PORTS, ClusterNames, LocalNames, Names, Port

__all__ = [
    "BLOCK_PORTS",
    "ClusterNames",
    "Credentials",
    "DesiredWorld",
    "Images",
    "LocalNames",
    "Names",
    "Port",
    "pod_names",
    "render",
    "render_plan",
]
