"""The local runtime: the Pods the operator would create, run as processes of this machine."""

from mooncakectl.local.errors import LocalRuntimeError, PodUnsupportedError
from mooncakectl.local.folders import Folders
from mooncakectl.local.runtime import LocalRuntime, PodStatus
from mooncakectl.local.world import World

__all__ = ["Folders", "LocalRuntime", "LocalRuntimeError", "PodStatus", "PodUnsupportedError", "World"]
