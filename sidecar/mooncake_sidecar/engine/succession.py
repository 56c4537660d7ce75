"""What each sidecar answers for in the pool, written down for the one that outlives it.

Only who knows a block by its engine's hash can ask the store's master about it. So each sidecar keeps its
share of the pool in a hash in Redis as well, and the share of an instance that has left for good goes to one
of those that remain, chosen by both names, so that all choose the same one and none gets everything. Two that
take over at once do no harm: both ask about the same blocks.

Keys, for each pool:

- `writers`        set: all that have a share
- `share:<id>`     hash: the engine's hash of a block -> tier (one byte), block key (u64, little-endian)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from struct import Struct
from zlib import crc32

import structlog

from mooncake_core.index import Tier
from mooncake_core.registry import Instance, Registry, Role
from mooncake_core.resp import RespClient
from mooncake_sidecar.engine.mirror import Shared

_log = structlog.get_logger(__name__)

MISSED_FOR_S = 4.0
"""A sidecar that restarts comes back within this and keeps its share."""
_BLOCKS_A_ROUND = 4096
_BLOCKS_A_CALL = 512
_ENTRY = Struct("<BQ")


class Succession:
    """One sidecar's share of a pool, and the shares that it takes over.

    Args:
        client: to the shared Redis.
        registry: tells who is there.
        namespace: prefix of the keys.
        pool: whose blocks these are.
        instance: who writes.
    """

    def __init__(
        self, client: RespClient, registry: Registry, *, namespace: str, pool: str, instance: str
    ) -> None:
        self.inherited = 0
        """Blocks taken over from others, and from an earlier life of this process."""
        self._client = client
        self._registry = registry
        self._root = f"mc:{{{namespace}}}:pool:{pool}:"
        self._pool = pool
        self._instance = instance
        self._missed_since_s: dict[str, float] = {}
        # Its own first: what an earlier life had taken over stands in no journal.
        self._reading: tuple[str, int] | None = (instance, 0)

    async def add(self, blocks: Iterable[Shared]) -> None:
        """Answer for blocks from now on. Written before the index is, which must not know more than this.

        Raises:
            ConnectionError: Redis is away.
        """
        fields: list[bytes] = []
        for block in blocks:
            fields += (block.hash, _ENTRY.pack(block.tier, block.key))
        for start in range(0, len(fields), 2 * _BLOCKS_A_CALL):
            part = fields[start : start + 2 * _BLOCKS_A_CALL]
            await self._client.call_many(
                [
                    ("SADD", f"{self._root}writers", self._instance),
                    ("HSET", self._share(self._instance), *part),
                ]
            )

    async def drop(self, hashes: Sequence[bytes]) -> None:
        """The store has these blocks no more. Written after the index was.

        Raises:
            ConnectionError: Redis is away.
        """
        for start in range(0, len(hashes), _BLOCKS_A_CALL):
            part = hashes[start : start + _BLOCKS_A_CALL]
            await self._client.call("HDEL", self._share(self._instance), *part)

    async def drop_all(self) -> None:
        """The store has lost everything.

        Raises:
            ConnectionError: Redis is away.
        """
        self._reading = None
        await self._client.call("UNLINK", self._share(self._instance))

    async def inherit(self) -> list[Shared]:
        """Take over a bounded part of what has nobody to answer for it; empty when there is nothing.

        Raises:
            ConnectionError: Redis is away.
        """
        reading = self._reading or await self._find_estate()
        # Should it break off, what was moved already is found among its own.
        self._reading = (self._instance, 0)
        taken: list[Shared] = []
        while reading is not None and len(taken) < _BLOCKS_A_ROUND:
            writer, cursor = reading
            blocks, cursor = await self._read(writer, cursor)
            taken += blocks
            if writer != self._instance:
                await self._move(writer, blocks)
            reading = (writer, cursor) if cursor else None
            if reading is None and writer != self._instance:
                await self._close_estate(writer)
        self._reading = reading
        self.inherited += len(taken)
        return taken

    async def _find_estate(self) -> tuple[str, int] | None:
        live = {one.id for one in await self._registry.instances() if self._is_peer(one)}
        if self._instance not in live:
            return None
        writers = {writer.decode() for writer in await self._client.call("SMEMBERS", f"{self._root}writers")}
        now_s = time.monotonic()
        known = self._missed_since_s
        self._missed_since_s = {writer: known.get(writer, now_s) for writer in sorted(writers - live)}
        for writer, since_s in self._missed_since_s.items():
            if now_s - since_s >= MISSED_FOR_S and heir(writer, live) == self._instance:
                _log.info("taking over what an instance that left has put into the pool", left=writer)
                return writer, 0
        return None

    def _is_peer(self, instance: Instance) -> bool:
        return instance.role is not Role.STORE and instance.store == self._pool

    async def _read(self, writer: str, cursor: int) -> tuple[list[Shared], int]:
        following, fields = await self._client.call(
            "HSCAN", self._share(writer), cursor, "COUNT", _BLOCKS_A_CALL
        )
        blocks = []
        for block_hash, entry in zip(fields[::2], fields[1::2], strict=True):
            tier, key = _ENTRY.unpack(entry)
            blocks.append(Shared(bytes(block_hash), key, Tier(tier)))
        return blocks, int(following)

    async def _move(self, writer: str, blocks: Sequence[Shared]) -> None:
        if not blocks:
            return
        await self.add(blocks)
        await self._client.call("HDEL", self._share(writer), *(block.hash for block in blocks))

    async def _close_estate(self, writer: str) -> None:
        # Whoever came back meanwhile and wrote is found again by what it left.
        if not await self._client.call("EXISTS", self._share(writer)):
            await self._client.call("SREM", f"{self._root}writers", writer)
            self._missed_since_s.pop(writer, None)

    def _share(self, writer: str) -> str:
        return f"{self._root}share:{writer}"


def heir(writer: str, live: Iterable[str]) -> str | None:
    """Who takes over from a writer that has left: the same one wherever it is worked out."""
    return max(live, key=lambda one: (crc32(f"{one}/{writer}".encode()), one), default=None)
