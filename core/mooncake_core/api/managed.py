"""What the product itself sets on the Pods it renders: a user's value for it is refused, never replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mooncake_core.api.base import Problem

ENV = frozenset(
    {
        "MC_FORCE_TCP",
        "MC_TCP_BIND_ADDRESS",
        "PYTHONHASHSEED",
        "VLLM_HOST_IP",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
    }
)
ENV_PREFIX = "MOONCAKE_"
ENV_FREE_PREFIX = "MOONCAKE_SIMULATOR_"
"""Switches of simulated engines (faults on demand), which are the user's."""
LABEL_PREFIXES = ("mooncake.io/", "app.kubernetes.io/")

ARGUMENTS: Mapping[str, str] = {
    "--block-size": "set engine.blockSize",
    "--data-parallel-size": "set instance.parallelism of the pool",
    "--disable-log-stats": "leave it out: it is set where a connector needs it",
    "--distributed-executor-backend": "leave it out: Pods of an instance find each other by mp",
    "--enable-prompt-tokens-details": "leave it out: it is always on",
    "--headless": "leave it out: it is what workers of an instance are started with",
    "--host": "leave it out: every port and address comes from the Pod",
    "--kv-events-config": "leave it out: the sidecar and the engine agree on it",
    "--kv-transfer-config": "set engine.connector",
    "--master-addr": "leave it out: it is the address of the instance's leader",
    "--master-port": "leave it out: every port and address comes from the Pod",
    "--model": "set model.path or model.name",
    "--no-enable-prefix-caching": "leave it out: prefix caching is what routing builds on",
    "--nnodes": "set instance.size of the pool",
    "--node-rank": "set instance.size of the pool",
    "--pipeline-parallel-size": "set instance.parallelism of the pool",
    "--port": "leave it out: every port and address comes from the Pod",
    "--profile": "set engine.simulated.profile",
    "--served-model-name": "set model.name",
    "--shutdown-timeout": "set drain.timeoutSeconds of the pool",
    "--tensor-parallel-size": "set instance.parallelism of the pool",
    "--time-scale": "set engine.simulated.timeScale",
}
_SHORT = {
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
}
_NAMES_AT_ONCE = 10
"""The API server bounds what one CEL rule may cost, and a pattern costs by its length."""


def _argument_patterns() -> Iterator[str]:
    spellings = ["[-_]".join(name.removeprefix("--").split("-")) for name in ARGUMENTS]
    for first in range(0, len(spellings), _NAMES_AT_ONCE):
        yield f"^--({'|'.join(spellings[first : first + _NAMES_AT_ONCE])})(=|$)"
    yield f"^-({'|'.join(name.removeprefix('-') for name in _SHORT)})(=|$)"


ARGUMENT_PATTERNS = tuple(_argument_patterns())
"""What `ARGUMENTS` and their other spellings look like, for CEL."""

SIDECAR_CONTAINER = "sidecar"
VOLUMES = frozenset({"admin", "api-keys", "config", "journal", "model", "redis", "run", "shm", "ssd"})
FOLDERS = ("/etc/mooncake", "/run/mooncake", "/var/lib/mooncake")


def is_managed_env(name: str) -> bool:
    """Whether the product sets this environment variable on an engine."""
    return name in ENV or is_own_env(name)


def is_own_env(name: str) -> bool:
    """Whether this is an environment variable of the product's own, wherever it is set."""
    return name.startswith(ENV_PREFIX) and not name.startswith(ENV_FREE_PREFIX)


def flag(argument: str) -> str:
    """The flag's name as vLLM spells it in full: `--max_model_len=5` → `--max-model-len`."""
    name = argument.split("=", 1)[0]
    name = _SHORT.get(name, name)
    return name.replace("_", "-") if name.startswith("--") else name


def argument_problems(at: str, arguments: Sequence[str]) -> Iterator[Problem]:
    """Complaints about arguments that the product sets itself."""
    for position, argument in enumerate(arguments):
        if remedy := ARGUMENTS.get(flag(argument)):
            yield Problem(f"{at}[{position}]", f"{flag(argument)} is set by Mooncake; {remedy}")
