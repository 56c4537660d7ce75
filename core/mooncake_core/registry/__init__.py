"""Who is there: the instances of a cluster, their epochs and how to reach them."""

from mooncake_core.registry.contract import (
    EngineKind,
    EngineReport,
    Instance,
    InstanceState,
    Registry,
    Role,
    StaleEpochError,
)
from mooncake_core.registry.memory import MemoryRegistry
from mooncake_core.registry.static import StaticRegistry

__all__ = [
    "EngineKind",
    "EngineReport",
    "Instance",
    "InstanceState",
    "MemoryRegistry",
    "Registry",
    "Role",
    "StaleEpochError",
    "StaticRegistry",
]
