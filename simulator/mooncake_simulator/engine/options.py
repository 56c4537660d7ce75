"""What the engine is told: vLLM's flags and environment, and a few of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_core.profiles import PROFILES, Profile

VLLM_VERSION = "0.32.0"
"""The release whose behaviour is imitated; answered by `GET /version`."""

DEAD_PEER_GRACE_S = 60.0
"""What a decode engine waits beyond the abort timeout for a prefill engine that died, as seen on vLLM."""


class OptionsError(Exception):
    """Flags or environment that no engine can start with; the message names the flag and the remedy."""


@dataclass(frozen=True, slots=True)
class EventsOptions:
    """`--kv-events-config`."""

    enabled: bool = False
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""
    max_queue_size: int = 100_000
    hashes_as_int: bool = True
    as_arrays: bool = False
    """The array encoding of vLLM before 0.25 (environment MOONCAKE_SIMULATOR_ARRAY_EVENTS=1)."""


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """One connector of `--kv-transfer-config`."""

    name: str
    role: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    load_failure_policy: str = "fail"

    @property
    def produces(self) -> bool:
        return self.role in ("kv_producer", "kv_both")

    @property
    def consumes(self) -> bool:
        return self.role in ("kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """`--nnodes`, `--node-rank`, `--master-addr`, `--master-port`: this process among those of one engine."""

    nodes: int = 1
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 29501


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """All that one engine process is told."""

    model: str
    served_model_names: tuple[str, ...]
    host: str
    port: int
    profile: Profile
    """Of the whole engine, all of its processes together."""
    time_scale: float
    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    group: GroupOptions = GroupOptions()
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prompt_tokens_details: bool = False
    shutdown_timeout_s: float = 0.0
    prefix_caching: bool = True
    mean_output_tokens: int = 256
    log_stats: bool = True
    """Without statistics vLLM's `/metrics` has no `vllm:` line at all."""
    load_tracking: bool = False
    """Whether `/load` counts; vLLM answers 0 without its flag."""
    events: EventsOptions = EventsOptions()
    connectors: tuple[ConnectorOptions, ...] = ()
    hash_seed: str | None = None
    host_ip: str = "127.0.0.1"
    bootstrap_port: int = 8998
    nixl_host: str = "localhost"
    nixl_port: int = 5600
    abort_timeout_s: float = 480.0
    dead_peer_grace_s: float = DEAD_PEER_GRACE_S
    store_config_path: str | None = None
    faults: Mapping[str, Any] = field(default_factory=dict)
    log_level: str = "info"
    unknown_flags: tuple[str, ...] = ()


def _tokens(text: str) -> int:
    """A number of tokens as vLLM writes it: 131072, 128k (thousands) or 128K (1024s)."""
    factors = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
    if text[-1:] in factors:
        return int(float(text[:-1]) * factors[text[-1]])
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_simulator.engine",
        description="A simulated vLLM engine. Takes vLLM's flags; those it does not know are warned about.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, help="model name, or a folder with tokenizer.json")
    add("--served-model-name", nargs="+", help="names under which requests may ask for it")
    add("--host", default="0.0.0.0")
    add("--port", type=int, default=8000)
    add("--block-size", type=int, default=16)
    add("--max-model-len", type=_tokens, help="default: what fits into the KV cache, at most 131072")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--max-num-queued-reqs", type=int)
    add("--max-num-queued-tokens", type=int)
    add("--num-gpu-blocks-override", type=int, help="default: the profile's KV capacity")
    add("--enable-prompt-tokens-details", action="store_true")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--disable-log-stats", action="store_true")
    add("--enable-server-load-tracking", action="store_true")
    add("--kv-events-config", type=_json_object, default={}, metavar="JSON")
    add("--kv-transfer-config", type=_json_object, default={}, metavar="JSON")
    add("--shutdown-timeout", type=float, default=0.0, help="wall seconds running requests get on SIGTERM")
    add("--tensor-parallel-size", type=int, default=1)
    add("--pipeline-parallel-size", type=int, default=1)
    add("--nnodes", type=int, default=1, help="processes, one a Pod, that are one engine")
    add("--node-rank", type=int, default=0, help="0 leads and serves")
    add("--master-addr", default="127.0.0.1", help="where the workers find rank 0")
    add("--master-port", type=int, default=29501)
    add("--distributed-executor-backend", choices=["mp", "uni"])
    add("--headless", action="store_true", help="be a worker: serve nothing, compute for rank 0")
    add("--profile", default="llama3-70b-8xa800", help="hardware and model whose speed each Pod has")
    add("--time-scale", type=float, default=1.0, help="model seconds per wall second")
    add("--mean-output-tokens", type=int, default=256, help="mean position of the end token; 0 = never")
    add("--uvicorn-log-level", "--log-level", dest="log_level", default="info")
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> EngineOptions:
    """Read flags and environment.

    Raises:
        OptionsError: a value cannot work; the message says which and what to give instead.
        SystemExit: argparse refused a flag.
    """
    flags, unknown = _parser().parse_known_args(argv)
    profile = PROFILES.get(flags.profile)
    if profile is None:
        raise OptionsError(f"--profile {flags.profile}: unknown; there are {', '.join(sorted(PROFILES))}")
    if flags.time_scale <= 0:
        raise OptionsError(f"--time-scale {flags.time_scale}: must be above 0")
    if flags.block_size < 1:
        raise OptionsError(f"--block-size {flags.block_size}: must be at least 1")
    group = _group(flags)
    profile = profile.over(
        group.nodes, tensor=flags.tensor_parallel_size, pipeline=flags.pipeline_parallel_size
    )
    blocks = flags.num_gpu_blocks_override or profile.kv_capacity_tokens // flags.block_size + 1
    capacity = (blocks - 1) * flags.block_size
    max_model_len = flags.max_model_len or min(131_072, capacity)
    if max_model_len > capacity or blocks < 2:
        raise OptionsError(
            f"--max-model-len {max_model_len}: the KV cache holds {capacity} tokens only; "
            "lower --max-model-len or raise --num-gpu-blocks-override"
        )
    return EngineOptions(
        model=flags.model,
        served_model_names=tuple(flags.served_model_name or [flags.model]),
        host=flags.host,
        port=flags.port,
        profile=profile,
        time_scale=flags.time_scale,
        block_size=flags.block_size,
        num_gpu_blocks=blocks,
        max_model_len=max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_queued_reqs=flags.max_num_queued_reqs,
        max_num_queued_tokens=flags.max_num_queued_tokens,
        group=group,
        tensor_parallel_size=flags.tensor_parallel_size,
        pipeline_parallel_size=flags.pipeline_parallel_size,
        prompt_tokens_details=flags.enable_prompt_tokens_details,
        shutdown_timeout_s=flags.shutdown_timeout,
        prefix_caching=flags.enable_prefix_caching,
        mean_output_tokens=flags.mean_output_tokens,
        log_stats=not flags.disable_log_stats,
        load_tracking=flags.enable_server_load_tracking,
        events=_events(flags.kv_events_config, environ),
        connectors=tuple(_connectors(flags.kv_transfer_config)),
        hash_seed=environ.get("PYTHONHASHSEED"),
        host_ip=environ.get("VLLM_HOST_IP") or "127.0.0.1",
        bootstrap_port=_port(environ, "VLLM_MOONCAKE_BOOTSTRAP_PORT", 8998),
        nixl_host=environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST") or "localhost",
        nixl_port=_port(environ, "VLLM_NIXL_SIDE_CHANNEL_PORT", 5600),
        abort_timeout_s=_seconds(environ, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 480.0),
        dead_peer_grace_s=_seconds(environ, "MOONCAKE_SIMULATOR_DEAD_PEER_GRACE", DEAD_PEER_GRACE_S),
        store_config_path=environ.get("MOONCAKE_CONFIG_PATH"),
        faults=_faults(environ.get("MOONCAKE_SIMULATOR_FAULTS")),
        log_level=flags.log_level,
        unknown_flags=tuple(unknown),
    )


def _group(flags: argparse.Namespace) -> GroupOptions:
    nodes, rank = flags.nnodes, flags.node_rank
    world = flags.tensor_parallel_size * flags.pipeline_parallel_size
    if min(nodes, world) < 1 or world % nodes:
        raise OptionsError(
            f"--nnodes {nodes}: must divide --tensor-parallel-size × --pipeline-parallel-size ({world})"
        )
    if not 0 <= rank < nodes:
        raise OptionsError(f"--node-rank {rank}: must be from 0 to {nodes - 1} (--nnodes {nodes})")
    if flags.headless != (rank > 0):
        raise OptionsError(f"--node-rank {rank}: rank 0 serves, all others need --headless")
    return GroupOptions(nodes, rank, flags.master_addr, flags.master_port)


def _events(config: Mapping[str, Any], environ: Mapping[str, str]) -> EventsOptions:
    enabled = bool(config.get("enable_kv_cache_events")) and config.get("publisher", "zmq") == "zmq"
    return EventsOptions(
        enabled=enabled,
        endpoint=config.get("endpoint", "tcp://*:5557"),
        replay_endpoint=config.get("replay_endpoint"),
        buffer_steps=config.get("buffer_steps", 10_000),
        hwm=config.get("hwm", 100_000),
        topic=config.get("topic", ""),
        max_queue_size=config.get("max_queue_size", 100_000),
        hashes_as_int=environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "0",
        as_arrays=environ.get("MOONCAKE_SIMULATOR_ARRAY_EVENTS", "0") == "1",
    )


KNOWN_CONNECTORS = ("MooncakeConnector", "NixlConnector", "MooncakeStoreConnector")


def _connectors(config: Mapping[str, Any]) -> list[ConnectorOptions]:
    name = config.get("kv_connector")
    if name is None:
        return []
    extra = config.get("kv_connector_extra_config") or {}
    if name == "MultiConnector":
        return [one for child in extra.get("connectors", []) for one in _connectors(child)]
    if name not in KNOWN_CONNECTORS:
        raise OptionsError(
            f"--kv-transfer-config: kv_connector {name} is not simulated; there are "
            f"{', '.join(KNOWN_CONNECTORS)} and MultiConnector"
        )
    role = config.get("kv_role")
    if role not in ("kv_producer", "kv_consumer", "kv_both"):
        raise OptionsError(
            f"--kv-transfer-config: {name} needs kv_role kv_producer, kv_consumer or kv_both; got {role}"
        )
    return [ConnectorOptions(name, role, extra, config.get("kv_load_failure_policy", "fail"))]


def _faults(text: str | None) -> Mapping[str, Any]:
    if not text:
        return {}
    try:
        faults = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionsError(f"MOONCAKE_SIMULATOR_FAULTS is not JSON: {error}") from error
    if not isinstance(faults, dict):
        raise OptionsError("MOONCAKE_SIMULATOR_FAULTS must be a JSON object")
    return faults


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdecimal() or int(text) > 65535:
        raise OptionsError(f"{name}={text}: not a port")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError as error:
        raise OptionsError(f"{name}={text}: not a number of seconds") from error
