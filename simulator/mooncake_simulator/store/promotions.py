"""Objects on their way from SSD to DRAM: who may come, who waits, who is carried. Pure.

After `TryPushPromotionQueue` and its neighbours in Mooncake 0.3.13's `master_service.cpp`: a key that
lies on SSD alone is admitted when it was looked up often enough and DRAM is below its high watermark; the
node that holds it fetches it with a heartbeat, and gets room for it then; it lies in DRAM when the node
has told so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_simulator.store.objects import Counts, Segment, SegmentStatus, StoredObject, Tier
from mooncake_simulator.store.sketch import LookupCounts


@dataclass(frozen=True, slots=True)
class PromotionRules:
    """Flags of the master, with the defaults of Mooncake's."""

    on_hit: bool = False
    """Whether lookups bring anything back at all."""
    admission_threshold: int = 2
    """Lookups of a key before it comes; at least 1."""
    max_per_heartbeat: int = 1
    """Objects that a node carries a heartbeat; at least 1.

    The real default is careful: its node reads them one after the other, and offloads nothing meanwhile.
    One a second would bring a conversation of 2 000 blocks back in half an hour. 512 blocks of 5 MB are
    what an SSD of 3 GB/s carries in a second; so many are what deployments should set.
    """


class Promotions:
    """All promotions of one store."""

    def __init__(self, rules: PromotionRules, counts: Counts) -> None:
        self._rules = rules
        self._counts = counts
        self._lookups = LookupCounts()
        self._waiting: dict[str, dict[str, StoredObject]] = {}
        """By segment and key, in the order of admission."""
        self._carried: dict[str, dict[str, StoredObject]] = {}
        """Fetched by their node; room in its DRAM is set aside for each."""

    @property
    def in_flight(self) -> int:
        """Objects that were admitted and have not come yet."""
        return sum(len(some) for each in (self._waiting, self._carried) for some in each.values())

    def carried_bytes(self, segment: str) -> int:
        """DRAM of a segment that is set aside for what its node carries."""
        return sum(stored.size_bytes for stored in self._carried.get(segment, {}).values())

    def is_carried(self, stored: StoredObject) -> bool:
        """Whether an object comes without anybody's doing."""
        return stored.key in self._carried.get(stored.segment, ())

    def looked_up(self, stored: StoredObject, above_watermark: bool) -> None:
        """Somebody looked up an object that lies on SSD."""
        if not self._rules.on_hit:
            return
        if self._lookups.count(stored.key) < self._rules.admission_threshold:
            self._counts.promotions_too_early += 1
        elif above_watermark:
            self._counts.promotions_rejected += 1
        elif not self.is_carried(stored):
            waiting = self._waiting.setdefault(stored.segment, {})
            self._counts.promotions_admitted += stored.key not in waiting
            waiting[stored.key] = stored

    def read(self, stored: StoredObject, segment: Segment, high_watermark: float) -> None:
        """An engine reads an object from SSD: it has the bytes, and DRAM keeps them if they fit."""
        size_bytes = stored.size_bytes
        if self.is_carried(stored):
            return
        if segment.used_bytes + size_bytes > high_watermark * segment.capacity_bytes:
            self._counts.promotions_rejected += 1
            return
        self.cancel(stored, segment)
        self._counts.promotions_admitted += 1
        segment.used_bytes += size_bytes
        self._come(stored, segment)

    def take(self, segment: Segment) -> list[StoredObject]:
        """What the segment's node is to carry now, with room for it set aside.

        A node carries what it took before it asks again: what it has not told of by then was lost.
        """
        for stored in list(self._carried.get(segment.name, {}).values()):
            self._give_up(stored, segment)
            self._counts.promotions_failed += 1
        waiting = self._waiting.get(segment.name, {})
        taken = []
        for stored in list(waiting.values())[: self._rules.max_per_heartbeat]:
            del waiting[stored.key]
            if segment.status is SegmentStatus.OK and segment.has_room(stored.size_bytes):
                segment.used_bytes += stored.size_bytes
                self._carried.setdefault(segment.name, {})[stored.key] = stored
                taken.append(stored)
            else:
                self._counts.promotions_failed += 1
        return taken

    def arrived(self, keys: Sequence[str], segments: Iterable[Segment]) -> list[bool]:
        """Objects lie in their segment's DRAM; False for those that were given up meanwhile."""
        homes = {key: segment for segment in segments for key in self._carried.get(segment.name, ())}
        return [key in homes and self._arrive(key, homes[key]) for key in keys]

    def cancel(self, stored: StoredObject, segment: Segment) -> None:
        """Forget an object that is no longer to come; one that was not, is ignored."""
        if self._waiting.get(stored.segment, {}).pop(stored.key, None) is not None:
            self._counts.promotions_cancelled += 1
        elif self.is_carried(stored):
            self._give_up(stored, segment)
            self._counts.promotions_cancelled += 1

    def forget(self, segment: str) -> None:
        """A segment is gone with all it held."""
        for each in (self._waiting, self._carried):
            self._counts.promotions_cancelled += len(each.pop(segment, ()))

    def _arrive(self, key: str, segment: Segment) -> bool:
        stored = self._carried[segment.name].pop(key, None)
        if stored is None:
            return False
        self._come(stored, segment)
        return True

    def _come(self, stored: StoredObject, segment: Segment) -> None:
        segment.ssd_used_bytes -= stored.size_bytes
        stored.tier = Tier.DRAM
        self._counts.promotions_completed += 1
        self._counts.promoted_bytes += stored.size_bytes

    def _give_up(self, stored: StoredObject, segment: Segment) -> None:
        del self._carried[segment.name][stored.key]
        segment.used_bytes -= stored.size_bytes
