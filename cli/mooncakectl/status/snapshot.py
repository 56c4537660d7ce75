"""What the admin API says, as rows; a part that an older or newer scheduler leaves out is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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

    @property
    def kv_share(self) -> float | None:
        """Share of the KV memory in use."""
        if self.kv_tokens is None or not self.kv_capacity_tokens:
            return None
        return self.kv_tokens / self.kv_capacity_tokens


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One latency against its target, in model seconds."""

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
    """A cluster at one moment."""

    instances: tuple[InstanceRow, ...] = ()
    ttft: LatencyRow = LatencyRow()
    tbt: LatencyRow = LatencyRow()
    token_hit_rate: float | None = None
    admitted: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    """Why something is missing or degraded."""


def snapshot_of(instances: Any, stats: Any) -> Snapshot:
    """Read the answers to `GET /instances` and `GET /stats`."""
    stats = stats if isinstance(stats, Mapping) else {}
    listed = instances.get("instances", []) if isinstance(instances, Mapping) else instances or []
    return Snapshot(
        instances=tuple(_instance(item) for item in listed if item.get("role") != "store"),
        ttft=_latency(stats.get("ttft"), stats.get("slo"), "ttft"),
        tbt=_latency(stats.get("tbt"), stats.get("slo"), "tbt"),
        token_hit_rate=stats.get("token_hit_rate"),
        admitted=int(stats.get("admitted") or 0),
        refused=dict(stats.get("refused") or {}),
    )


def _instance(item: Mapping[str, Any]) -> InstanceRow:
    load = item.get("load") or {}
    return InstanceRow(
        id=str(item.get("id", "")),
        role=str(item.get("role", "")),
        state=str(item.get("state", "")),
        queued_s=load.get("queued_s"),
        batch=load.get("batch"),
        kv_tokens=load.get("kv_tokens"),
        kv_capacity_tokens=item.get("kv_capacity_tokens"),
    )


def _latency(measured: Any, slo: Any, name: str) -> LatencyRow:
    measured = measured if isinstance(measured, Mapping) else {}
    slo = slo if isinstance(slo, Mapping) else {}
    return LatencyRow(
        p50_s=measured.get("p50"),
        p90_s=measured.get("p90"),
        target_s=slo.get(f"{name}_s"),
        percentile=int(slo.get(f"{name}_percentile") or 90),
    )
