"""The targets of one request, from what the manifest says: seconds, or multiples of an idle request."""

from __future__ import annotations

from mooncake_core.config.scheduler import SloConfig
from mooncake_scheduler.conductor.cost import CostModel
from mooncake_scheduler.conductor.model import Slo


def targets_of(
    slo: SloConfig, prompt_tokens: int, output_tokens: int, prefill: CostModel, decode: CostModel
) -> Slo:
    """The targets in seconds.

    A multiplier is taken of this very request on an idle instance without any of its prefix; it gives no
    target while the cost model is cold. Where both a time and a multiplier are given, the time counts.
    """
    ttft_s = slo.ttft_s
    if ttft_s is None and slo.ttft_multiplier is not None and prefill.knows_prefill:
        ttft_s = slo.ttft_multiplier * prefill.prefill_s(prompt_tokens, 0)
    tbt_s = slo.tbt_s
    if tbt_s is None and slo.tbt_multiplier is not None and decode.knows_decode:
        tbt_s = slo.tbt_multiplier * decode.step_s(1, prompt_tokens + output_tokens)
    return Slo(ttft_s, tbt_s)
