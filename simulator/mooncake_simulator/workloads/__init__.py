"""Workloads: traces in the format released with the Mooncake paper, generators, and what a trace contains."""

from mooncake_simulator.workloads.distributions import Distribution, parse_distribution, parse_quantity
from mooncake_simulator.workloads.prompts import Vocabulary, prompt_json, prompt_json_parts, prompt_tokens
from mooncake_simulator.workloads.sessions import CONVERSATION, SessionShape, generate
from mooncake_simulator.workloads.summary import TraceStatistics, describe, token_hit_rate
from mooncake_simulator.workloads.traces import (
    BLOCK_TOKENS,
    Request,
    TraceError,
    jitter,
    read_trace,
    write_trace,
)

__all__ = [
    "BLOCK_TOKENS",
    "CONVERSATION",
    "Distribution",
    "Request",
    "SessionShape",
    "TraceError",
    "TraceStatistics",
    "Vocabulary",
    "describe",
    "generate",
    "jitter",
    "parse_distribution",
    "parse_quantity",
    "prompt_json",
    "prompt_json_parts",
    "prompt_tokens",
    "read_trace",
    "token_hit_rate",
    "write_trace",
]
