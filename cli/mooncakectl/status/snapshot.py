"""What the admin ports say, as rows; a part that an older or newer scheduler leaves out is None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncakectl.status.stores import StoreRow


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance; durations in model seconds."""

    id: str
    role: str
    state: str
    queued_s: float | None = None
    batch: float | None = None
    kv_tokens: float | None = None
    kv_capacity_tokens: float | None = None
    requests: int = 0
    token_hit_rate: float | None = None
    conditions: tuple[str, ...] = ()

    @property
    def kv_share(self) -> float | None:
        """Share of the KV memory in use."""
        if self.kv_tokens is None or not self.kv_capacity_tokens:
            return None
        return self.kv_tokens / self.kv_capacity_tokens


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One latency against its target, in model seconds; of several schedulers the worst."""

    p50_s: float | None = None
    p90_s: float | None = None
    target_s: float | None = None
    percentile: int = 90

    @property
    def is_held(self) -> bool | None:
        """Whether the target holds; None when either is unknown, or the percentile is not shown."""
        measured = {50: self.p50_s, 90: self.p90_s}.get(self.percentile)
        if measured is None or self.target_s is None:
            return None
        return measured <= self.target_s


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cluster at one moment; counters are sums over its schedulers."""

    instances: tuple[InstanceRow, ...] = ()
    stores: tuple[StoreRow, ...] = ()
    ttft: LatencyRow = LatencyRow()
    tbt: LatencyRow = LatencyRow()
    token_hit_rate: float | None = None
    admitted: int = 0
    completed: int = 0
    failed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What is degraded, and which schedulers do not answer."""


@dataclass
class Answers:
    """Of each scheduler that answered: `GET /instances` and `GET /stats`; of each store, how full it is."""

    instances: list[dict[str, Any]] = field(default_factory=list)
    stats: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stores: list[StoreRow] = field(default_factory=list)


def snapshot_of(answers: Answers) -> Snapshot:
    """Bring the answers of all schedulers together."""
    # They share the ledger, so that the first one's loads are the cluster's.
    listed = answers.instances[0].get("instances", []) if answers.instances else []
    refused: Counter[str] = Counter()
    for stats in answers.stats:
        refused.update(stats.get("refused") or {})
    degraded = dict.fromkeys(line for stats in answers.stats for line in stats.get("degraded") or ())
    return Snapshot(
        instances=tuple(_instance(item, answers) for item in listed if item.get("role") != "store"),
        stores=tuple(answers.stores),
        ttft=_latency(answers.stats, "ttft"),
        tbt=_latency(answers.stats, "tbt"),
        token_hit_rate=_hit_rate(answers.stats),
        admitted=_total(answers.stats, "admitted"),
        completed=_total(answers.stats, "completed"),
        failed=_total(answers.stats, "failed"),
        refused=refused,
        problems=(*degraded, *answers.problems),
    )


def _instance(item: Mapping[str, Any], answers: Answers) -> InstanceRow:
    load = item.get("load") or {}
    # Requests are counted by each scheduler for itself.
    everywhere = [
        seen
        for document in answers.instances
        for seen in document.get("instances", ())
        if seen.get("id") == item.get("id")
    ]
    return InstanceRow(
        id=str(item.get("id", "")),
        role=str(item.get("role", "")),
        state=str(item.get("state", "")),
        queued_s=load.get("queued_s"),
        batch=load.get("batch"),
        kv_tokens=load.get("kv_tokens"),
        kv_capacity_tokens=item.get("kv_capacity_tokens"),
        requests=_total(everywhere, "requests"),
        token_hit_rate=_hit_rate(everywhere),
        conditions=tuple(str(condition.get("type", "")) for condition in item.get("conditions") or ()),
    )


def _latency(all_stats: Sequence[Mapping[str, Any]], name: str) -> LatencyRow:
    def worst(percentile: str) -> float | None:
        measured = [
            value for stats in all_stats if (value := (stats.get(name) or {}).get(percentile)) is not None
        ]
        return max(measured, default=None)

    slo: Mapping[str, Any] = (all_stats[0].get("slo") or {}) if all_stats else {}
    return LatencyRow(
        p50_s=worst("p50"),
        p90_s=worst("p90"),
        target_s=slo.get(f"{name}_s"),
        percentile=int(slo.get(f"{name}_percentile") or 90),
    )


def _hit_rate(documents: Sequence[Mapping[str, Any]]) -> float | None:
    prompt_tokens = _total(documents, "prompt_tokens")
    return _total(documents, "cached_tokens") / prompt_tokens if prompt_tokens else None


def _total(documents: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(int(document.get(name) or 0) for document in documents)
