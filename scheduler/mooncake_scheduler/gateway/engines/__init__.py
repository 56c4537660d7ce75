"""How each engine's hand-over is spoken: the bodies and headers of its two legs."""

from mooncake_scheduler.gateway.engines.bootstrap import EngineIds, Rank
from mooncake_scheduler.gateway.engines.vllm import (
    PrefillAnswer,
    check_extra_arguments,
    decode_body,
    must_stay_whole,
    pairs,
    prefill_body,
    read_prefill_answer,
    release_body,
    whole_body,
)

__all__ = [
    "EngineIds",
    "PrefillAnswer",
    "Rank",
    "check_extra_arguments",
    "decode_body",
    "must_stay_whole",
    "pairs",
    "prefill_body",
    "read_prefill_answer",
    "release_body",
    "whole_body",
]
