"""The prefix index: which instance holds which blocks, in which tier."""

from mooncake_core.index.contract import Change, Depth, PrefixIndex, Removed, Source, Stored, Tier
from mooncake_core.index.memory import MemoryIndex
from mooncake_core.index.redis import RedisIndex, SlotsExhaustedError
from mooncake_core.index.stats import IndexStats

__all__ = [
    "Change",
    "Depth",
    "IndexStats",
    "MemoryIndex",
    "PrefixIndex",
    "RedisIndex",
    "Removed",
    "SlotsExhaustedError",
    "Source",
    "Stored",
    "Tier",
]
