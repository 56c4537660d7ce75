"""Who holds which object: segments, placement, leases, eviction, tiers. Pure: time is a parameter.

Rules after Mooncake's `mooncake-store.md` and `master_service.cpp`: objects are immutable and become
visible with `put_end`; existence checks, lookups and reads grant a lease during which an object is not
evicted; above the high watermark a share of the objects goes, least recently used first. A node with an
SSD takes what leaves its DRAM; reading it from there brings it back when there is room, and lookups do
where the rules of promotion say so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from mooncake_simulator.store.objects import (
    Counts,
    Location,
    PutRefusal,
    Segment,
    SegmentStatus,
    StoredObject,
    Tier,
)
from mooncake_simulator.store.promotions import PromotionRules, Promotions

PUT_START_DISCARD_S = 30.0
"""A put that has not ended by then has failed."""


class Directory:
    """All keys and segments of one store."""

    def __init__(
        self,
        *,
        high_watermark: float = 0.9,
        eviction_ratio: float = 0.05,
        lease_s: float = 10.0,
        client_ttl_s: float = 10.0,
        promotion: PromotionRules | None = None,
    ) -> None:
        self.counts = Counts()
        self.promotions = Promotions(promotion or PromotionRules(), self.counts)
        self.segments: dict[str, Segment] = {}
        self.clients: dict[str, float] = {}
        """When each client was last heard of."""
        self._high_watermark = high_watermark
        self._eviction_ratio = eviction_ratio
        self._lease_s = lease_s
        self._client_ttl_s = client_ttl_s
        self._objects: OrderedDict[str, StoredObject] = OrderedDict()
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._objects)

    def readable_keys(self) -> Iterator[str]:
        """Keys that can be read."""
        return (key for key, stored in self._objects.items() if stored.complete)

    def peek(self, key: str) -> StoredObject | None:
        """An object that can be read, without a lease (what the admin endpoints use)."""
        stored = self._objects.get(key)
        return stored if stored is not None and stored.complete else None

    @property
    def used_bytes(self) -> int:
        """DRAM in use."""
        return sum(segment.used_bytes for segment in self.segments.values())

    @property
    def capacity_bytes(self) -> int:
        """DRAM of all segments."""
        return sum(segment.capacity_bytes for segment in self.segments.values())

    @property
    def ssd_used_bytes(self) -> int:
        """SSD in use."""
        return sum(segment.ssd_used_bytes for segment in self.segments.values())

    @property
    def ssd_capacity_bytes(self) -> int:
        """SSD of all nodes."""
        return sum(segment.ssd_capacity_bytes for segment in self.segments.values())

    def tier_counts(self) -> tuple[int, int]:
        """Objects in DRAM and on SSD."""
        on_ssd = sum(1 for stored in self._objects.values() if stored.tier is Tier.SSD)
        return len(self._objects) - on_ssd, on_ssd

    def mount(self, segment: Segment, now_s: float) -> None:
        """Take a segment; one of the same name replaces it, and what it held is gone."""
        self.unmount(segment.name)
        self.segments[segment.name] = segment
        self.clients[segment.client_id] = now_s

    def unmount(self, name: str) -> int:
        """Forget a segment and all it holds; returns how many objects are gone."""
        if self.segments.pop(name, None) is None:
            return 0
        self.promotions.forget(name)
        lost = [key for key, stored in self._objects.items() if stored.segment == name]
        for key in lost:
            del self._objects[key]
        return len(lost)

    def heartbeat(self, client_id: str, now_s: float) -> bool:
        """A client lives; False when it is unknown and has to mount again."""
        if client_id not in self.clients:
            return False
        self.clients[client_id] = now_s
        return True

    def expire(self, now_s: float) -> list[str]:
        """Forget clients that were silent too long, and puts that never ended; returns lost segments."""
        silent = [one for one, at_s in self.clients.items() if now_s - at_s > self._client_ttl_s]
        lost = [s.name for s in self.segments.values() if s.client_id in silent]
        for name in lost:
            self.unmount(name)
        for client_id in silent:
            del self.clients[client_id]
        for stored in list(self._objects.values()):
            if not stored.complete and now_s - stored.put_at_s > PUT_START_DISCARD_S:
                self._drop(stored)
                self.counts.discarded_puts += 1
        return lost

    def put_start(
        self, objects: Sequence[tuple[str, int]], now_s: float, preferred: str | None = None
    ) -> list[Location | PutRefusal]:
        """Reserve room for objects of (key, bytes); they cannot be read before `put_end`."""
        return [self._place(key, size, now_s, preferred) for key, size in objects]

    def put_end(self, keys: Sequence[str], now_s: float) -> list[bool]:
        """Make written objects readable; False where the reservation is gone."""
        done = []
        for key in keys:
            stored = self._objects.get(key)
            if stored is not None:
                stored.complete = True
                self._objects.move_to_end(key)
                self.counts.sizes[stored.size_bytes] += 1
            done.append(stored is not None)
        if self._above_watermark():
            self.evict(now_s)
        return done

    def put_revoke(self, keys: Sequence[str]) -> None:
        """Give reservations back that were not written."""
        for key in keys:
            stored = self._objects.get(key)
            if stored is not None and not stored.complete:
                self._drop(stored)

    def exists(self, keys: Sequence[str], now_s: float) -> list[bool]:
        """Which keys can be read; those get a lease."""
        return [self._lease(key, now_s) is not None for key in keys]

    def get(self, keys: Sequence[str], now_s: float) -> list[Location | None]:
        """Where to read each key from, under a lease; objects read from SSD come back to DRAM if they fit."""
        found: list[Location | None] = []
        for key in keys:
            stored = self._hit(key, now_s)
            found.append(_location(stored))
            if stored is not None and stored.tier is Tier.SSD:
                self.promotions.read(stored, self.segments[stored.segment], self._high_watermark)
        return found

    def lookup(self, keys: Sequence[str], now_s: float) -> list[Location | None]:
        """Where each key lies, under a lease; enough lookups let a node bring it from SSD to DRAM."""
        found: list[Location | None] = []
        above_watermark = self.used_bytes >= self._high_watermark * self.capacity_bytes
        for key in keys:
            stored = self._hit(key, now_s)
            found.append(_location(stored))
            if stored is not None and stored.tier is Tier.SSD:
                self.promotions.looked_up(stored, above_watermark)
        return found

    def take_promotions(self, client_id: str) -> list[StoredObject]:
        """What a node is to carry from its SSD to its DRAM until it asks again."""
        return [stored for segment in self._lent_by(client_id) for stored in self.promotions.take(segment)]

    def end_promotions(self, client_id: str, keys: Sequence[str], now_s: float) -> list[bool]:
        """Objects lie in DRAM; False for those that left meanwhile."""
        arrived = self.promotions.arrived(keys, self._lent_by(client_id))
        if self._above_watermark():
            self.evict(now_s)
        return arrived

    def remove(self, key: str) -> bool:
        """Delete one object."""
        stored = self._objects.get(key)
        if stored is None:
            return False
        self._drop(stored)
        return True

    def remove_all(self) -> int:
        """Delete every object; returns how many."""
        count = len(self._objects)
        for stored in list(self._objects.values()):
            self._drop(stored)
        return count

    def evict(self, now_s: float, least_bytes: int = 0) -> int:
        """Evict a share of the objects in DRAM, at least so many bytes; returns the bytes that left it."""
        self.counts.evictions_attempted += 1
        in_memory = [o for o in self._objects.values() if o.tier is Tier.DRAM and o.complete]
        wanted = max(1, int(len(in_memory) * self._eviction_ratio)) if in_memory else 0
        freed = evicted = 0
        for stored in in_memory:
            if evicted >= wanted and freed >= least_bytes and not self._above_watermark():
                break
            if stored.lease_until_s > now_s:
                continue
            freed += stored.size_bytes
            evicted += 1
            self._demote_or_drop(stored, now_s)
        if evicted:
            self.counts.evictions_successful += 1
            self.counts.evicted_keys += evicted
            self.counts.evicted_bytes += freed
        return freed

    def objects_in(self, segment: str) -> list[StoredObject]:
        """What a segment holds."""
        return [stored for stored in self._objects.values() if stored.segment == segment]

    def move(self, key: str, targets: Sequence[str]) -> bool:
        """Move an object to the DRAM of one of these segments; False when none has room."""
        stored = self._objects.get(key)
        if stored is None:
            return True
        target = self._choose(stored.size_bytes, None, only=targets)
        if target is None:
            return False
        self.promotions.cancel(stored, self.segments[stored.segment])
        self._return_space(stored)
        target.used_bytes += stored.size_bytes
        stored.segment, stored.tier = target.name, Tier.DRAM
        return True

    def _place(self, key: str, size: int, now_s: float, preferred: str | None) -> Location | PutRefusal:
        if key in self._objects:
            return PutRefusal.EXISTS
        target = self._choose(size, preferred)
        if target is None and self.evict(now_s, least_bytes=size):
            target = self._choose(size, preferred)
        if target is None:
            self.counts.alloc_failures += 1
            return PutRefusal.NO_SPACE
        target.used_bytes += size
        self._objects[key] = StoredObject(key, size, target.name, put_at_s=now_s)
        return Location(target.name, Tier.DRAM, size)

    def _choose(self, size: int, preferred: str | None, only: Sequence[str] | None = None) -> Segment | None:
        fitting = [
            segment
            for segment in self.segments.values()
            if segment.status is SegmentStatus.OK
            and segment.has_room(size)
            and (only is None or segment.name in only)
        ]
        for segment in fitting:
            if segment.name == preferred:
                return segment
        return min(fitting, key=lambda s: s.used_bytes / s.capacity_bytes, default=None)

    def _lent_by(self, client_id: str) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment.client_id == client_id]

    def _hit(self, key: str, now_s: float) -> StoredObject | None:
        stored = self._lease(key, now_s)
        self.counts.get(stored)
        return stored

    def _lease(self, key: str, now_s: float) -> StoredObject | None:
        stored = self.peek(key)
        if stored is not None:
            stored.lease_until_s = now_s + self._lease_s
            self._objects.move_to_end(key)
        return stored

    def _above_watermark(self) -> bool:
        capacity = self.capacity_bytes
        return capacity > 0 and self.used_bytes > self._high_watermark * capacity

    def _demote_or_drop(self, stored: StoredObject, now_s: float) -> None:
        segment = self.segments[stored.segment]
        size = stored.size_bytes
        if size > segment.ssd_capacity_bytes:
            self._drop(stored)
            return
        if segment.ssd_used_bytes + size > segment.ssd_capacity_bytes:
            self._make_room_on_ssd(segment, size, now_s)
        if segment.ssd_used_bytes + size > segment.ssd_capacity_bytes:
            self._drop(stored)
            return
        segment.used_bytes -= size
        segment.ssd_used_bytes += size
        stored.tier = Tier.SSD
        self.counts.demoted_keys += 1

    def _make_room_on_ssd(self, segment: Segment, size: int, now_s: float) -> None:
        # A share at a time: looking through all objects for each one that is demoted would be quadratic.
        target = segment.ssd_capacity_bytes - max(
            size, int(segment.ssd_capacity_bytes * self._eviction_ratio)
        )
        for old in list(self._objects.values()):
            if segment.ssd_used_bytes <= target:
                break
            if old.tier is not Tier.SSD or old.segment != segment.name or old.lease_until_s > now_s:
                continue
            if not self.promotions.is_carried(old):
                self._drop(old)

    def _return_space(self, stored: StoredObject) -> None:
        segment = self.segments[stored.segment]
        if stored.tier is Tier.DRAM:
            segment.used_bytes -= stored.size_bytes
        else:
            segment.ssd_used_bytes -= stored.size_bytes

    def _drop(self, stored: StoredObject) -> None:
        self.promotions.cancel(stored, self.segments[stored.segment])
        self._return_space(stored)
        del self._objects[stored.key]


def _location(stored: StoredObject | None) -> Location | None:
    return None if stored is None else Location(stored.segment, stored.tier, stored.size_bytes)
