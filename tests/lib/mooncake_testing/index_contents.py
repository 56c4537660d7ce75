"""All that the prefix index on Redis holds, read past the scripts that serve from it (ADR 0010)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import redis

_FIRST_BUCKETS = 256
_OVERFLOW_SLOT = 8191


def index_contents(client: redis.Redis, namespace: str) -> dict[str, dict[int, int]]:
    """Tiers (bits of `Tier`) by key, by instance; what ended lives have left is not there.

    Meant for a small index at rest: it reads every bucket.
    """
    root = f"mc:{{{namespace}}}:index"
    live = {int(slot): name.decode() for slot, name in _hash(client, f"{root}:live").items()}
    buckets = int(_hash(client, root).get(b"buckets", _FIRST_BUCKETS))
    low = 1 << (buckets.bit_length() - 1)
    pipeline = client.pipeline(transaction=False)
    for bucket in range(buckets):
        pipeline.hgetall(f"{root}:{bucket}")
    contents: dict[str, dict[int, int]] = defaultdict(dict)
    for bucket, words_by_rest in enumerate(pipeline.execute()):
        split = bucket < buckets - low or bucket >= low
        known = _known_bytes(low * 2 if split else low)
        for rest, words in words_by_rest.items():
            key = int.from_bytes(bucket.to_bytes(3, "little")[:known] + rest, "little")
            for at in range(0, len(words), 2):
                slot = words[at] // 8 + 32 * words[at + 1]
                assert slot != _OVERFLOW_SLOT, f"block {key:x} has more holders than are listed"
                if slot in live:
                    contents[live[slot]][key] = words[at] % 8
    return contents


def _known_bytes(width: int) -> int:
    return 3 if width >= 1 << 24 else 2 if width >= 1 << 16 else 1


def _hash(client: redis.Redis, name: str) -> dict[bytes, bytes]:
    found: Any = client.hgetall(name)
    return dict(found)
