"""What the store's directory keeps: objects, the segments they lie in, and what it counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, IntEnum


class Tier(Enum):
    """Where an object lies."""

    DRAM = "dram"
    SSD = "ssd"


class SegmentStatus(IntEnum):
    """What may be done with a segment; numbers as Mooncake's."""

    UNDEFINED = 0
    OK = 1
    UNMOUNTING = 2
    DRAINING = 3
    DRAINED = 4


@dataclass(slots=True)
class Segment:
    """The memory that one node lends, and its SSD."""

    name: str
    """`host:port` under which the node's data path answers."""
    client_id: str
    capacity_bytes: int
    ssd_capacity_bytes: int = 0
    used_bytes: int = 0
    ssd_used_bytes: int = 0
    status: SegmentStatus = SegmentStatus.OK

    def has_room(self, size_bytes: int) -> bool:
        """Whether an object fits into its DRAM."""
        return self.used_bytes + size_bytes <= self.capacity_bytes


@dataclass(slots=True)
class StoredObject:
    """One key."""

    key: str
    size_bytes: int
    segment: str
    tier: Tier = Tier.DRAM
    complete: bool = False
    put_at_s: float = 0.0
    lease_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where to read or write an object."""

    segment: str
    tier: Tier
    size_bytes: int


class PutRefusal(Enum):
    """Why an object is not taken."""

    EXISTS = "OBJECT_ALREADY_EXISTS"
    NO_SPACE = "NO_AVAILABLE_HANDLE"


@dataclass(slots=True)
class Counts:
    """What the directory did; the master's metrics show it."""

    evictions_attempted: int = 0
    evictions_successful: int = 0
    evicted_keys: int = 0
    evicted_bytes: int = 0
    demoted_keys: int = 0
    promotions_admitted: int = 0
    promotions_completed: int = 0
    promoted_bytes: int = 0
    promotions_too_early: int = 0
    """Lookups of keys on SSD that had been looked up too seldom."""
    promotions_rejected: int = 0
    """Above the watermark."""
    promotions_failed: int = 0
    """No room when the node fetched them, or never told of."""
    promotions_cancelled: int = 0
    """The object left, or something else brought it, before it had come."""
    memory_hits: int = 0
    ssd_hits: int = 0
    memory_hit_bytes: int = 0
    ssd_hit_bytes: int = 0
    gets: int = 0
    valid_gets: int = 0
    alloc_failures: int = 0
    discarded_puts: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    """Objects taken, by size: there are few sizes, and nobody may ever read the metrics."""

    def get(self, found: StoredObject | None) -> None:
        """Account for a key that was asked for to be read."""
        self.gets += 1
        if found is None:
            return
        self.valid_gets += 1
        if found.tier is Tier.SSD:
            self.ssd_hits += 1
            self.ssd_hit_bytes += found.size_bytes
        else:
            self.memory_hits += 1
            self.memory_hit_bytes += found.size_bytes
