"""`/metrics` with vLLM 0.32's names, labels and buckets; durations are model seconds (ADR 0014)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from mooncake_simulator.engine.batching import Scheduler
from mooncake_simulator.engine.options import EngineOptions
from mooncake_simulator.engine.sequence import Sequence

_Family = TypeVar("_Family", Gauge, Counter)

CONTENT_TYPE = CONTENT_TYPE_LATEST

# The families of vLLM's `v1/metrics/buckets.py`.
_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_ITERATION_TOKENS = tuple(float(1 << power) for power in (0, *range(3, 15)))
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
_PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def _token_buckets(max_model_len: int) -> list[float]:
    values: list[float] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > max_model_len:
                return values
            values.append(mantissa * power)
        power *= 10


class EngineMetrics:
    """All that an engine tells of itself. Gauges and cache counters are read from the scheduler on scrape."""

    def __init__(self, options: EngineOptions) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": options.served_model_names[0], "engine": "0"}
        names = ("model_name", "engine")
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._running = gauge("num_requests_running", "Number of requests in model execution batches.")
        self._waiting = gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        by_reason = self._family(
            Gauge,
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            (*names, "reason"),
        )
        self._by_reason = {r: by_reason.labels(**self._labels, reason=r) for r in ("capacity", "deferred")}
        self._by_stage: dict[str, Gauge] = {}
        if any(connector.consumes for connector in options.connectors):
            stages = self._family(
                Gauge,
                "num_requests_kv_fetch_by_stage",
                "Number of waiting requests by async KV load stage.",
                (*names, "stage"),
            )
            self._by_stage = {
                stage: stages.labels(**self._labels, stage=stage)
                for stage in ("waiting_to_start", "in_progress", "completed_waiting")
            }
        sleep = self._family(Gauge, "engine_sleep_state", "Engine sleep state.", (*names, "sleep_state"))
        for state in ("awake", "weights_offloaded", "discard_all"):
            sleep.labels(**self._labels, sleep_state=state).set(state == "awake")
        self._usage = gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self._queries = counter("prefix_cache_queries", "Prefix cache queries, in queried tokens.")
        self._hits = counter("prefix_cache_hits", "Prefix cache hits, in cached tokens.")
        self._external_queries = counter(
            "external_prefix_cache_queries", "External prefix cache queries, in queried tokens."
        )
        self._external_hits = counter(
            "external_prefix_cache_hits", "External prefix cache hits, in cached tokens."
        )
        counter("mm_cache_queries", "Multi-modal cache queries.")
        counter("mm_cache_hits", "Multi-modal cache hits.")
        self._preemptions = counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = counter("prompt_tokens", "Number of prefill tokens processed.")
        by_source = self._family(
            Counter, "prompt_tokens_by_source", "Number of prompt tokens by source.", (*names, "source")
        )
        self._by_source = {s: by_source.labels(**self._labels, source=s) for s in _PROMPT_SOURCES}
        self._cached = counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        cached_by = self._family(
            Counter, "prompt_tokens_cached_by_source", "Prefix-cache hit tokens by tier.", (*names, "source")
        )
        self.cached_by_source = {s: cached_by.labels(**self._labels, source=s) for s in _CACHE_SOURCES}
        self.generation_tokens = counter("generation_tokens", "Number of generation tokens processed.")
        finished = self._family(
            Counter,
            "request_success",
            "Count of successfully processed requests.",
            (*names, "finished_reason"),
        )
        self._finished = {r: finished.labels(**self._labels, finished_reason=r) for r in _FINISH_REASONS}
        rejections = self._family(
            Counter, "admission_rejections", "Requests rejected at admission.", (*names, "reason")
        )
        self.rejections = {
            r: rejections.labels(**self._labels, reason=r)
            for r in ("max_num_queued_reqs", "max_num_queued_tokens")
        }
        tokens = _token_buckets(options.max_model_len)
        self.iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens per engine step.", _ITERATION_TOKENS
        )
        self._prompt_length = histogram("request_prompt_tokens", "Number of prefill tokens.", tokens)
        self._output_length = histogram("request_generation_tokens", "Number of generation tokens.", tokens)
        self._max_output = histogram("request_max_num_generation_tokens", "Most generation tokens.", tokens)
        self._params_n = histogram("request_params_n", "The n request parameter.", (1, 2, 5, 10, 20))
        self._params_max = histogram("request_params_max_tokens", "The max_tokens parameter.", tokens)
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token in seconds.", _TTFT_S)
        self.itl = histogram("inter_token_latency_seconds", "Inter-token latency in seconds.", _ITL_S)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Time per output token per request.", _ITL_S
        )
        self._e2e = histogram("e2e_request_latency_seconds", "E2E request latency in seconds.", _LATENCY_S)
        self._queue = histogram("request_queue_time_seconds", "Time spent in WAITING phase.", _LATENCY_S)
        self._inference = histogram(
            "request_inference_time_seconds", "Time spent in RUNNING phase.", _LATENCY_S
        )
        self._prefill = histogram("request_prefill_time_seconds", "Time spent in PREFILL phase.", _LATENCY_S)
        self._decode = histogram("request_decode_time_seconds", "Time spent in DECODE phase.", _LATENCY_S)
        self._request_preemptions = histogram(
            "request_num_preemptions", "Times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "New KV tokens computed during prefill.", tokens
        )
        info = {
            "block_size": str(options.block_size),
            "num_gpu_blocks": str(options.num_gpu_blocks),
            "enable_prefix_caching": str(options.prefix_caching),
            "prefix_caching_hash_algo": "sha256",
            "cache_dtype": "auto",
            "gpu_memory_utilization": "0.9",
            "num_cpu_blocks": "None",
            "engine": "0",
        }
        self._family(
            Gauge, "cache_config_info", "Information of the LLMEngine CacheConfig", tuple(info)
        ).labels(**info).set(1)

    def prompt_processed(self, sequence: Sequence) -> None:
        """A prompt's last chunk is done: its first token comes with this step."""
        tokens = sequence.prompt_tokens
        external = min(sequence.external_tokens, tokens)
        local = min(sequence.local_tokens, tokens - external)
        self.prompt_tokens.inc(tokens)
        self._by_source["local_compute"].inc(tokens - local - external)
        self._by_source["local_cache_hit"].inc(local)
        self._by_source["external_kv_transfer"].inc(external)
        self._cached.inc(local + external)
        self.cached_by_source["device"].inc(local)

    def request_finished(self, sequence: Sequence, reason: str, now_s: float) -> None:
        """Account for an ended request."""
        self._finished[reason].inc()
        times = sequence.times
        output = sequence.output_tokens
        self._e2e.observe(now_s - times.arrived_s)
        self._prompt_length.observe(sequence.prompt_tokens)
        self._output_length.observe(output)
        self._max_output.observe(output)
        self._params_n.observe(1)
        self._params_max.observe(sequence.limits.max_tokens)
        self._request_preemptions.observe(sequence.preemptions)
        if times.scheduled_s is not None:
            self._queue.observe(times.scheduled_s - times.arrived_s)
            self._inference.observe(now_s - times.scheduled_s)
            self._computed.observe(max(0, sequence.prompt_tokens - max(0, sequence.cached_tokens)))
            if times.first_token_s is not None:
                self._prefill.observe(times.first_token_s - times.scheduled_s)
                self._decode.observe(now_s - times.first_token_s)
                if output > 1:
                    self._tpot.observe((now_s - times.first_token_s) / (output - 1))

    def render(self, scheduler: Scheduler) -> bytes:
        """The exposition text, with gauges as they are now."""
        deferred = len(scheduler.loading)
        ready = len(scheduler.ready)
        waiting = len(scheduler.waiting) + ready
        self._running.set(len(scheduler.running))
        self._waiting.set(waiting + deferred)
        self._by_reason["capacity"].set(waiting)
        self._by_reason["deferred"].set(deferred)
        if self._by_stage:
            self._by_stage["in_progress"].set(deferred)
            self._by_stage["completed_waiting"].set(ready)
        self._usage.set(scheduler.pool.usage)
        counts = scheduler.counts
        _raise_to(self._queries, counts.queries)
        _raise_to(self._hits, counts.hits)
        _raise_to(self._external_queries, counts.external_queries)
        _raise_to(self._external_hits, counts.external_hits)
        _raise_to(self._preemptions, counts.preemptions)
        return generate_latest(self.registry)

    def _family(self, kind: type[_Family], name: str, text: str, labels: Iterable[str]) -> _Family:
        return kind(f"vllm:{name}", text, labelnames=tuple(labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._family(Gauge, name, text, self._labels).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text, self._labels).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(
            f"vllm:{name}",
            text,
            labelnames=tuple(self._labels),
            buckets=tuple(buckets),
            registry=self.registry,
        )
        return family.labels(**self._labels)


def _raise_to(counter: Counter, total: float) -> None:
    # The scheduler counts; Prometheus' client only knows how to add.
    counter.inc(total - counter._value.get())
