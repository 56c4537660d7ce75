"""A map from block keys to small numbers that takes about 16 bytes a block.

A dict of a million ints takes over 100 bytes an entry. Here blocks lie as packed records in small buckets,
which `bytes.find` searches at C speed; linear hashing splits one bucket at a time, so that no insert ever
waits for a table to be rebuilt.

Source: W. Litwin, "Linear Hashing", VLDB 1980.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from struct import Struct

_RECORD = Struct("<QBI")  # key, stamp, value
_SIZE = _RECORD.size
_STAMP = 8
_VALUE = 9
_BUCKET_BLOCKS = 48
_FIRST_BUCKETS = 16
_AGES = 64
"""Steps of age in a budget."""
_OLD_AGE = 96
"""Ages beyond this one are not told apart: a stamp is an age modulo 256 and must not come round again."""


class BlockTable:
    """Block key → value (1 .. 2³² − 1). 0 stands for "not there".

    With a budget it forgets what was stored longest ago. Age counts in steps of 1/64 of the budget, and a
    whole step is forgotten at once: the blocks of one update are of one age, so that the head of a prefix is
    never forgotten before its tail.

    Args:
        budget: blocks to remember; None = all. One update may exceed it.
        forgot: told the value of each block that vanishes because of its age.
    """

    def __init__(self, budget: int | None, forgot: Callable[[int], None]) -> None:
        self._buckets = [bytearray() for _ in range(_FIRST_BUCKETS)]
        self._low = _FIRST_BUCKETS
        """The power of two at or below the number of buckets, where this round of splits began."""
        self._records = 0
        self._budget = budget
        self._forgot = forgot
        self._now = 0
        self._oldest = 0
        self._by_age: Counter[int] = Counter()
        self._live_stamps = b"\0"
        self._young_stamps = b"\0"
        self._stored_in_age = 0
        self._stored_unsettled = 0
        self._next_to_clean = 0

    def __len__(self) -> int:
        """Blocks remembered."""
        return self._by_age.total()

    @property
    def bytes(self) -> int:
        """Bytes of all records, those included that are forgotten and not cleaned away yet."""
        return self._records * _SIZE

    @property
    def buckets(self) -> int:
        """Number of buckets, of a few dozen blocks each: the unit of `rewrite`'s work."""
        return len(self._buckets)

    def get(self, key: int) -> int:
        """The value of a key, 0 where there is none."""
        bucket = self._bucket(key)
        at = _find(bucket, key.to_bytes(8, "little"))
        if at < 0 or bucket[at + _STAMP] not in self._live_stamps:
            return 0
        return int.from_bytes(bucket[at + _VALUE : at + _SIZE], "little")

    def put(self, key: int, change: Callable[[int], int]) -> None:
        """Replace the value of a key by what `change` makes of it (0: remove it); it counts as stored now."""
        bucket = self._bucket(key)
        at = _find(bucket, key.to_bytes(8, "little"))
        old = self._take(bucket, at)
        value = change(old)
        if not value:
            if at >= 0:
                self._cut(bucket, at)
            return
        self._by_age[self._now] += 1
        self._stored_unsettled += 1
        if at >= 0:
            _RECORD.pack_into(bucket, at, key, self._now & 0xFF, value)
            return
        bucket += _RECORD.pack(key, self._now & 0xFF, value)
        self._records += 1
        if self._records > _BUCKET_BLOCKS * len(self._buckets):
            self._split()

    def alter(self, key: int, change: Callable[[int], int]) -> None:
        """As `put`, but only where the key is there, and without making it younger."""
        bucket = self._bucket(key)
        at = _find(bucket, key.to_bytes(8, "little"))
        if at >= 0 and bucket[at + _STAMP] in self._live_stamps:
            self._alter(bucket, at, change)

    def settle(self) -> None:
        """Grow older, forget, and clean up in proportion to what was stored. Call after each update."""
        if self._budget is None:
            return
        stored, self._stored_unsettled = self._stored_unsettled, 0
        self._stored_in_age += stored
        if self._stored_in_age * _AGES >= self._budget:
            self._stored_in_age = 0
            self._now += 1
        excess = len(self) - self._budget
        while (excess > 0 or not self._by_age[self._oldest]) and self._oldest < self._now - 1:
            excess -= self._by_age.pop(self._oldest)
            self._oldest += 1
        self._live_stamps = bytes(age & 0xFF for age in range(self._oldest, self._now + 1))
        self._young_stamps = self._live_stamps[-_OLD_AGE:]
        # A pass over all buckets thus ends within a few ages, long before a stamp comes round again.
        for _ in range(stored // 4 + 1):
            self._next_to_clean = (self._next_to_clean + 1) % len(self._buckets)
            self._clean(self._buckets[self._next_to_clean])

    def rewrite(self, start: int, stop: int, change: Callable[[int], int]) -> None:
        """Let `change` replace every value in the buckets from `start` to before `stop`; 0 removes.

        A split moves blocks to a bucket behind all others: a pass from the first to the last misses none.
        """
        for bucket in self._buckets[start:stop]:
            self._clean(bucket)
            for at in range(len(bucket) - _SIZE, -1, -_SIZE):
                self._alter(bucket, at, change)

    def _bucket(self, key: int) -> bytearray:
        number = key & (2 * self._low - 1)
        if number >= len(self._buckets):
            number &= self._low - 1
        return self._buckets[number]

    def _age(self, stamp: int) -> int:
        return self._now - ((self._now - stamp) & 0xFF)

    def _take(self, bucket: bytearray, at: int) -> int:
        """The value of a record that is about to be replaced, no longer counted; 0 where it is forgotten."""
        if at < 0:
            return 0
        _, stamp, value = _RECORD.unpack_from(bucket, at)
        age = self._age(stamp)
        if age < self._oldest:
            self._forgot(value)
            return 0
        self._by_age[age] -= 1
        return int(value)

    def _alter(self, bucket: bytearray, at: int, change: Callable[[int], int]) -> None:
        key, stamp, old = _RECORD.unpack_from(bucket, at)
        value = change(old)
        if not value:
            self._by_age[self._age(stamp)] -= 1
            self._cut(bucket, at)
        elif value != old:
            _RECORD.pack_into(bucket, at, key, stamp, value)

    def _cut(self, bucket: bytearray, at: int) -> None:
        last = bucket[-_SIZE:]
        del bucket[-_SIZE:]
        if at < len(bucket):
            bucket[at : at + _SIZE] = last
        self._records -= 1

    def _clean(self, bucket: bytearray) -> None:
        if not bucket[_STAMP::_SIZE].translate(None, self._young_stamps):
            return
        for at in range(len(bucket) - _SIZE, -1, -_SIZE):
            stamp = bucket[at + _STAMP]
            if stamp not in self._live_stamps:
                self._forgot(int.from_bytes(bucket[at + _VALUE : at + _SIZE], "little"))
                self._cut(bucket, at)
            elif stamp not in self._young_stamps:
                self._by_age[self._age(stamp)] -= 1
                self._by_age[self._now - _OLD_AGE + 1] += 1
                bucket[at + _STAMP] = self._young_stamps[0]

    def _split(self) -> None:
        number = len(self._buckets) - self._low
        bucket = self._buckets[number]
        byte, bit = divmod(self._low.bit_length() - 1, 8)
        halves = (bytearray(), bytearray())
        for at in range(0, len(bucket), _SIZE):
            halves[bucket[at + byte] >> bit & 1].extend(bucket[at : at + _SIZE])
        self._buckets[number] = halves[0]
        self._buckets.append(halves[1])
        if len(self._buckets) == 2 * self._low:
            self._low *= 2


def _find(bucket: bytearray, key: bytes) -> int:
    at = bucket.find(key)
    while at > 0 and at % _SIZE:
        at = bucket.find(key, at + 1)
    return at
