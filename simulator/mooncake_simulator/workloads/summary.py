"""What a trace contains: sizes, rates, and how much of it a cache could serve."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from mooncake_core.percentiles import percentile
from mooncake_simulator.workloads.traces import BLOCK_TOKENS, Request


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in five numbers."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class TraceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a trace that the papers give of theirs."""

    requests: int
    span_s: float
    requests_per_s: float
    input_tokens: Sizes
    output_tokens: Sizes
    total_input_tokens: int
    total_output_tokens: int
    blocks: int
    unique_blocks: int
    token_hit_rate: float
    """Share of prompt tokens that a cache without limits has, requests served one after the other."""


def describe(requests: Sequence[Request]) -> TraceStatistics:
    """Work out the statistics of a trace.

    Raises:
        ValueError: there are no requests.
    """
    if not requests:
        raise ValueError("a trace without requests has no statistics")
    inputs = [request.input_length for request in requests]
    outputs = [request.output_length for request in requests]
    times_ms = [request.timestamp_ms for request in requests]
    span_s = (max(times_ms) - min(times_ms)) / 1000
    return TraceStatistics(
        requests=len(requests),
        span_s=span_s,
        requests_per_s=len(requests) / span_s if span_s else float(len(requests)),
        input_tokens=_sizes(inputs),
        output_tokens=_sizes(outputs),
        total_input_tokens=sum(inputs),
        total_output_tokens=sum(outputs),
        blocks=sum(len(request.hash_ids) for request in requests),
        unique_blocks=len({hash_id for request in requests for hash_id in request.hash_ids}),
        token_hit_rate=token_hit_rate(requests),
    )


def token_hit_rate(
    requests: Sequence[Request],
    capacity_blocks: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> float:
    """Share of prompt tokens found in one shared cache, in the order of the trace.

    Only a prefix without a hole counts. With a capacity the least recently used block leaves first; of one
    prompt the later blocks count as used before the earlier ones: without its beginning a prefix is worth
    nothing.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    cached_tokens = prompt_tokens = 0
    for done, request in enumerate(requests, start=1):
        depth = 0
        for hash_id in request.hash_ids:
            if hash_id not in cache:
                break
            depth += 1
        cached_tokens += min(depth * BLOCK_TOKENS, request.input_length)
        prompt_tokens += request.input_length
        for hash_id in reversed(request.hash_ids):
            cache[hash_id] = None
            cache.move_to_end(hash_id)
        while capacity_blocks is not None and len(cache) > capacity_blocks:
            cache.popitem(last=False)
        if on_progress is not None:
            on_progress(done)
    return cached_tokens / prompt_tokens if prompt_tokens else 0.0


def _sizes(values: Sequence[int]) -> Sizes:
    ordered = sorted(values)

    return Sizes(
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        max=float(ordered[-1]),
    )
