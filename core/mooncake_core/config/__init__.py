"""The configuration documents that the operator renders and the processes read."""

from mooncake_core.config.scheduler import (
    AdmissionConfig,
    AdmissionMode,
    AuthConfig,
    InstanceShape,
    ListenConfig,
    RoutingConfig,
    SchedulerConfig,
    SloConfig,
    StoppingConfig,
)
from mooncake_core.config.sidecar import SidecarConfig

__all__ = [
    "AdmissionConfig",
    "AdmissionMode",
    "AuthConfig",
    "InstanceShape",
    "ListenConfig",
    "RoutingConfig",
    "SchedulerConfig",
    "SidecarConfig",
    "SloConfig",
    "StoppingConfig",
]
