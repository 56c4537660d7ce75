"""Whether a store has the room that was asked for, and how much of it is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_core.api.scalars import quantity_bytes
from mooncake_operator.planning import reasons
from mooncake_operator.planning.verdicts import Verdict

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


@dataclass(frozen=True, slots=True)
class StoreLevel:
    """What a store's master says, in bytes of DRAM."""

    capacity_bytes: int
    allocated_bytes: int


def capacity_verdict(spec: Mapping[str, Any], level: StoreLevel | None) -> Verdict:
    """`CapacityReady`: whether as many segments are mounted as the pool wants.

    Being full is not held against a store: it is a cache and evicts above its watermark.

    Args:
        spec: of the live MooncakeKVCachePool.
        level: what its master says; None = it does not answer.
    """
    replicas, segment = int(spec.get("replicas") or 1), str(spec["segmentSize"])
    if level is None:
        return Verdict(
            "CapacityReady",
            None,
            reasons.MASTER_UNREACHABLE,
            "the store's master does not answer the operator; see MasterReady, and whether a NetworkPolicy"
            " keeps the operator out",
        )
    wanted_bytes = replicas * quantity_bytes(segment)
    message = f"{binary(level.capacity_bytes)} of {binary(wanted_bytes)} ({replicas} × {segment}) are mounted"
    if level.capacity_bytes >= wanted_bytes:
        return Verdict("CapacityReady", True, reasons.SEGMENTS_MOUNTED, message)
    return Verdict(
        "CapacityReady",
        False,
        reasons.SEGMENTS_MISSING,
        f"{message}; the nodes that are not ready yet bring the rest",
    )


def level_fields(level: StoreLevel | None) -> dict[str, Any]:
    """Fields of a store's status; without a level none is known."""
    if level is None:
        return {}
    share = 100 * level.allocated_bytes // level.capacity_bytes if level.capacity_bytes else 0
    return {
        "capacityBytes": level.capacity_bytes,
        "allocatedBytes": level.allocated_bytes,
        "capacity": binary(level.capacity_bytes),
        "used": f"{share}%",
    }


def binary(number_bytes: int) -> str:
    """Bytes as a quantity of at most three digits before the unit and one after the point: 1.2Ti."""
    value, unit = float(number_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + _UNITS[unit]
