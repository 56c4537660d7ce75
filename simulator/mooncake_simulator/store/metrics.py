"""The master's `/metrics` in the words of Mooncake 0.3.13 (`master_metric_manager.cpp`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from mooncake_simulator.store.directory import Directory
from mooncake_simulator.store.objects import Counts

CONTENT_TYPE = "text/plain; version=0.0.4"

SINGLE_CALLS = (
    "exist_key",
    "put_start",
    "put_end",
    "put_revoke",
    "get_replica_list",
    "get_replica_list_by_regex",
    "remove",
    "remove_by_regex",
    "remove_all",
    "mount_segment",
    "unmount_segment",
    "remount_segment",
    "ping",
    "copy_start",
    "copy_end",
    "copy_revoke",
    "move_start",
    "move_end",
    "move_revoke",
    "evict_disk_replica",
    "create_copy_task",
    "create_move_task",
    "update_task",
    "query_task",
    "fetch_tasks",
)
BATCH_CALLS = (
    "batch_exist_key",
    "batch_query_ip",
    "batch_replica_clear",
    "batch_get_replica_list",
    "batch_put_start",
    "batch_put_end",
    "batch_put_revoke",
)
_CANDIDATES = tuple(
    f"candidate_{name}"
    for name in (
        "recorded",
        "admitted",
        "admission_rejected",
        "expired_evaluated",
        "expired_unevaluated",
        "dropped_limit",
    )
)
_SIZE_BUCKETS = (4096, 65536, 262144, 1048576, 4194304, 16777216, 67108864)


class MasterMetrics:
    """Counts calls; everything else is read from the directory."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._items: Counter[str] = Counter()
        self._failed_items: Counter[str] = Counter()
        self._partial: Counter[str] = Counter()

    def called(self, name: str, *, items: int = 1, failed_items: int = 0) -> None:
        """Account for one call."""
        self._calls[name] += 1
        if name in BATCH_CALLS:
            self._items[name] += items
            self._failed_items[name] += failed_items
            if items and failed_items == items:
                self._failures[name] += 1
            elif failed_items:
                self._partial[name] += 1
        elif failed_items:
            self._failures[name] += 1

    def render(self, directory: Directory) -> bytes:
        """The exposition text."""
        lines: list[str] = []
        for name, kind, samples in self._families(directory):
            lines.append(f"# HELP {name} {name.replace('_', ' ').strip()}")
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{suffix} {value}" for suffix, value in samples]
        return ("\n".join(lines) + "\n").encode()

    def summary(self, directory: Directory) -> str:
        """One line of `/metrics/summary`."""
        used, capacity = directory.used_bytes, directory.capacity_bytes
        share = 100 * used / capacity if capacity else 0.0
        return (
            f"role=leader, state=serving, service_ready=true, master={{Mem Storage: {used} B / {capacity} B "
            f"({share:.1f}%) | Keys: {len(directory)} | Clients: {len(directory.clients)}}}, ha={{}}"
        )

    def _families(self, directory: Directory) -> Iterator[tuple[str, str, list[tuple[str, float]]]]:
        counts = directory.counts
        segments = directory.segments.values()

        def one(name: str, kind: str, value: float) -> tuple[str, str, list[tuple[str, float]]]:
            return name, kind, [("", value)]

        yield one("master_allocated_bytes", "gauge", directory.used_bytes)
        yield one("master_total_capacity_bytes", "gauge", directory.capacity_bytes)
        for name, attribute in (
            ("segment_allocated_bytes", "used_bytes"),
            ("segment_total_capacity_bytes", "capacity_bytes"),
        ):
            yield name, "gauge", [(f'{{segment="{s.name}"}}', getattr(s, attribute)) for s in segments]
        yield one("master_nof_allocated_bytes", "gauge", 0)
        yield one("master_total_nof_capacity_bytes", "gauge", 0)
        yield one("master_allocated_file_size_bytes", "gauge", directory.ssd_used_bytes)
        yield one("master_total_file_capacity_bytes", "gauge", directory.ssd_capacity_bytes)
        yield one("master_key_count", "gauge", len(directory))
        yield one("master_soft_pin_key_count", "gauge", 0)
        yield one("master_active_clients", "gauge", len(directory.clients))
        yield "master_value_size_bytes", "histogram", _size_samples(counts.sizes)
        for name in SINGLE_CALLS:
            yield one(f"master_{name}_requests_total", "counter", self._calls[name])
            yield one(f"master_{name}_failures_total", "counter", self._failures[name])
        yield one("master_put_start_alloc_failures_total", "counter", counts.alloc_failures)
        yield one("master_put_start_partial_allocations_total", "counter", 0)
        for name in BATCH_CALLS:
            yield one(f"master_{name}_requests_total", "counter", self._calls[name])
            yield one(f"master_{name}_failures_total", "counter", self._failures[name])
            yield one(f"master_{name}_partial_successes_total", "counter", self._partial[name])
            yield one(f"master_{name}_items_total", "counter", self._items[name])
            yield one(f"master_{name}_failed_items_total", "counter", self._failed_items[name])
        yield one("mem_cache_hit_nums_", "counter", counts.memory_hits)
        yield one("file_cache_hit_nums_", "counter", counts.ssd_hits)
        yield one("mem_cache_hit_bytes_total", "counter", counts.memory_hit_bytes)
        yield one("file_cache_hit_bytes_total", "counter", counts.ssd_hit_bytes)
        in_memory, on_ssd = directory.tier_counts()
        yield one("mem_cache_nums_", "gauge", in_memory)
        yield one("file_cache_nums_", "gauge", on_ssd)
        yield one("valid_get_nums_", "counter", counts.valid_gets)
        yield one("total_get_nums_", "counter", counts.gets)
        yield one("master_successful_evictions_total", "counter", counts.evictions_successful)
        yield one("master_attempted_evictions_total", "counter", counts.evictions_attempted)
        yield one("master_evicted_key_count", "counter", counts.evicted_keys)
        yield one("master_evicted_size_bytes", "counter", counts.evicted_bytes)
        yield one("master_put_start_discard_cnt", "counter", counts.discarded_puts)
        yield one("master_promotion_in_flight", "gauge", directory.promotions.in_flight)
        for name, value in _promotion_counters(counts):
            yield one(f"master_promotion_{name}_total", "counter", value)
        yield one("ha_oplog_standby_lag", "gauge", 0)
        yield one("ha_oplog_pending_entries", "gauge", 0)
        yield one("ha_standby_state", "gauge", 0)


def _promotion_counters(counts: Counts) -> Iterator[tuple[str, int]]:
    yield "admitted", counts.promotions_admitted
    yield "completed", counts.promotions_completed
    yield "completed_bytes", counts.promoted_bytes
    yield "failed", counts.promotions_failed
    yield "cancelled", counts.promotions_cancelled
    yield "rejected_frequency", counts.promotions_too_early
    yield "rejected_watermark", counts.promotions_rejected
    # Nothing expires, no queue is full and nothing refused is tried again here: see ADR 33.
    for name in ("expired", "rejected_cap", *_CANDIDATES):
        yield name, 0


def _size_samples(sizes: Counter[int]) -> list[tuple[str, float]]:
    samples: list[tuple[str, float]] = []
    for bound in (*_SIZE_BUCKETS, inf):
        name = "+Inf" if bound == inf else f"{bound:.6f}"
        samples.append((f'_bucket{{le="{name}"}}', sum(n for size, n in sizes.items() if size <= bound)))
    total = sum(size * count for size, count in sizes.items())
    return [*samples, ("_sum", total), ("_count", sizes.total())]
