"""Which model is served, by which engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from mooncake_core.api import managed
from mooncake_core.api.arguments import number_of
from mooncake_core.api.base import ApiModel, Problem, Rule, Write, server_rule
from mooncake_core.api.scalars import AbsolutePath, Argument, ObjectName, Text
from mooncake_core.api.support import not_yet_value
from mooncake_core.profiles import PROFILES

MAX_ARGUMENTS = 64
_SIMULATED_MAX_BATCH = 256
"""vLLM's `--max-num-seqs` where it is not given, which the simulated engine keeps."""

# No `$`: these go into arguments, where Kubernetes expands `$(NAME)`.
ModelName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=253),
    Write("the name clients ask for, e.g. kimi-k2"),
]


class PersistentVolumeClaim(ApiModel):
    """A volume claim of the cluster's namespace."""

    claim_name: ObjectName
    read_only: bool = True


class HostPath(ApiModel):
    """A folder of the machine."""

    path: AbsolutePath


class ModelVolume(ApiModel):
    """Where the model's files lie; mounted at `model.path` in engines and schedulers."""

    persistent_volume_claim: PersistentVolumeClaim | None = None
    host_path: HostPath | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda v: (v.persistent_volume_claim is None) != (v.host_path is None),
            "has(self.persistentVolumeClaim) != has(self.hostPath)",
            "needs one; write persistentVolumeClaim: {claimName: models}, or hostPath: {path: /models}",
        ),
    )


class ModelSpec(ApiModel):
    """The model that all pools of a cluster serve."""

    name: ModelName
    """Name under which clients ask for it."""
    path: AbsolutePath | None = None
    """Folder with weights, tokenizer and chat template; left out: the name is looked up by the engine."""
    volume: ModelVolume | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda m: m.volume is None or m.path is not None,
            "!has(self.volume) || has(self.path)",
            "is required with a volume, which is mounted there; write e.g. /models/kimi-k2",
            at="path",
        ),
    )


class SimulatedSpec(ApiModel):
    """How fast simulated engines are."""

    profile: Annotated[Text, Write(f"one of {', '.join(PROFILES)}")] = "llama3-70b-8xa800"
    """Hardware and model whose published speed they have."""
    time_scale: Annotated[int, Field(ge=1, le=1000), Write("a whole number, e.g. 10")] = 1
    """Model seconds that pass in one second of the clock."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: s.profile in PROFILES,
            f"self.profile in [{', '.join(repr(name) for name in PROFILES)}]",
            f"is not a known profile; write one of {', '.join(PROFILES)}",
            at="profile",
        ),
    )


class EngineSpec(ApiModel):
    """The engine that all prefill and decode instances of a cluster run; they must agree to exchange KV."""

    type: Literal["vLLM", "SGLang", "Simulated"]
    image: Annotated[Text, Write("a container image, e.g. vllm/vllm-openai:v0.33.0")] | None = None
    connector: Literal["MooncakeConnector", "NixlConnector"] = "MooncakeConnector"
    """How KV goes from prefill to decode."""
    args: Annotated[list[Argument], Field(max_length=MAX_ARGUMENTS)] = Field(default_factory=list)
    """Further arguments of vLLM's server, the same for all instances."""
    block_size: Annotated[int, Field(ge=1, le=4096), Write("tokens of a KV block, e.g. 16")] = 16
    """Tokens of one KV block. The only place to set it: `--block-size` in `args` is refused."""
    simulated: SimulatedSpec | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        not_yet_value(
            "type", lambda e: e.type != "SGLang", "self.type != 'SGLang'", "SGLang", "write vLLM or Simulated"
        ),
        Rule(
            lambda e: e.type != "vLLM" or e.image is not None,
            "self.type != 'vLLM' || has(self.image)",
            "is required for vLLM; write a container image, e.g. vllm/vllm-openai:v0.33.0",
            at="image",
        ),
        Rule(
            lambda e: e.type == "Simulated" or e.simulated is None,
            "self.type == 'Simulated' || !has(self.simulated)",
            "only simulated engines have it; remove it, or write type: Simulated",
            at="simulated",
        ),
    )

    SERVER_RULES: ClassVar[tuple[Rule, ...]] = tuple(
        server_rule(
            f"!self.args.exists(a, a.matches('{pattern}'))",
            "an argument is set by Mooncake itself (address, ports, model, block size, connectors …);"
            " remove it",
            at="args",
        )
        for pattern in managed.ARGUMENT_PATTERNS
    )

    def problems(self) -> Iterator[Problem]:
        return managed.argument_problems("args", self.args)

    @property
    def time_scale(self) -> int:
        """Model seconds per second of the clock; 1 for real engines."""
        return self.simulated.time_scale if self.simulated is not None else 1

    @property
    def profile(self) -> str | None:
        """Name of the profile of simulated engines; None for real ones."""
        if self.type != "Simulated":
            return None
        return (self.simulated or SimulatedSpec()).profile

    @property
    def max_batch(self) -> int:
        """Most requests in one batch; 0 = only the engine knows."""
        given = number_of(self.args, "--max-num-seqs")
        if given is not None:
            return given
        return _SIMULATED_MAX_BATCH if self.type == "Simulated" else 0
