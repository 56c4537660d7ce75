"""Brings blocks of the pool from SSD to DRAM, and keeps them there, as schedulers want it.

A store of Mooncake takes no orders about its tiers, but it goes by what is read: a block that is looked up
stays, and one on SSD comes back to DRAM with the second look (`--promotion_on_hit`). Looking up needs the
store's client, a library of its own, and the store's name of a block, which the sidecar of the engine that
has put it there knows. Where a block lies the master's admin port says: to the client a master that is away
and a block that is unknown are one. No data is moved by this process.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx
import msgspec
import structlog

from mooncake_core.index import Tier
from mooncake_core.promotion import Cursor, Found, PromotionStreams
from mooncake_core.resp import ReplyError
from mooncake_sidecar.engine.pool import Pool

_log = structlog.get_logger(__name__)

POLL_S = 0.2
"""Wall seconds between two looks for wishes."""
LOCATE_EVERY_S = 0.5
"""Wall seconds between two questions about what is on its way."""
ARRIVES_WITHIN_S = 30.0
"""Wall seconds after which a block that did not come is not waited for: DRAM was full."""
CLIENT_AGAIN_S = 5.0
_KEYS_A_CALL = 512
_WISHES_A_READ = 64
_LOCAL_BUFFER_BYTES = 16 << 20


class StoreClient(Protocol):
    """What is used of `MooncakeDistributedStore` (mooncake.store, Mooncake 0.3.13); its calls block."""

    def setup(self, *arguments: Any) -> int:
        """Connect; 0 = done."""

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, Any]:
        """The replicas of each key that the store has; counts as reading them. Empty where it is away."""

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """1 for each key that it has; below 0 for all where it is away."""

    def close(self) -> int:
        """Disconnect."""


class _Coming:
    """Blocks of one wish that are on their way to DRAM."""

    def __init__(self, number: int, names: dict[bytes, int], until_s: float) -> None:
        self.number = number
        self.names = names
        self.until_s = until_s


class Prefetcher:
    """One sidecar's part in it: the blocks that it answers for.

    Args:
        pool: knows them, and the store's master.
        streams: where wishes come from.
        module: with the class `MooncakeDistributedStore`.
        address: host:port of the master's RPC.
        host: under which this process is known to the store.
    """

    def __init__(
        self, pool: Pool, streams: PromotionStreams, *, module: str, address: str, host: str
    ) -> None:
        self.brought = 0
        """Blocks that came back from SSD."""
        self.not_brought = 0
        """Blocks that were to come and did not."""
        self.kept = 0
        """Look-ups of blocks that are to stay."""
        self.client_away = False
        self._pool = pool
        self._streams = streams
        self._module = module
        self._address = address
        self._host = host
        self._client: StoreClient | None = None
        self._client_again_s = 0.0
        # Its own: a look-up that hangs because the master is away must not hold up what else needs threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-client")
        self._cursor: Cursor | None = None
        self._coming: list[_Coming] = []
        """Not by number: who leads next counts from 1 again."""
        self._locate_at_s = 0.0

    async def run(self) -> None:
        """Do what is wanted until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
            except (ConnectionError, ReplyError) as error:
                _log.debug("no wishes can be read now", error=str(error))
            except Exception as error:
                # Another version's wish, or a foreign library: the engine's registration must not end by it.
                _log.warning("what is wanted in DRAM is left out: it cannot be made out", error=repr(error))

    def close(self) -> None:
        """Let go of the store, without waiting for a call that hangs."""
        self._let_go()
        self._thread.shutdown(wait=False)

    async def _look(self) -> None:
        if self._cursor is None:
            # What was wanted before this process began was wanted of another one.
            self._cursor = await self._streams.newest(self._streams.wishes)
        wishes = await self._streams.read_wishes(self._cursor, _WISHES_A_READ)
        keep = self._pool.known(key for wish in wishes if not wish.number for key in wish.keys)
        # What had to leave all the same comes back by this, too.
        self.kept += await self._look_up(list(keep), 1)
        for wish in wishes:
            if wish.number and (names := self._pool.known(wish.keys)):
                await self._bring(wish.number, names)
        now_s = time.monotonic()
        if self._coming and now_s >= self._locate_at_s:
            self._locate_at_s = now_s + LOCATE_EVERY_S
            await self._see_what_came(now_s)

    async def _bring(self, number: int, names: dict[bytes, int]) -> None:
        tiers = await self._locate(list(names))
        if tiers is None:
            return
        by_tier: dict[Tier | None, list[bytes]] = {Tier.SSD: [], Tier.DRAM: [], None: []}
        for name, tier in zip(names, tiers, strict=True):
            by_tier[tier].append(name)
        cold, there, gone = by_tier[Tier.SSD], by_tier[Tier.DRAM], by_tier[None]
        # With the second look the store begins to bring them.
        if cold and await self._look_up(cold, 2) == len(cold):
            until_s = time.monotonic() + ARRIVES_WITHIN_S
            self._coming.append(_Coming(number, {name: names[name] for name in cold}, until_s))
        await self._look_up(there, 1)
        if there or gone:
            keys = [[names[name] for name in each] for each in (there, gone)]
            await self._streams.report(Found(0.0, number, (), *keys))

    async def _look_up(self, names: Sequence[bytes], times: int) -> int:
        """Look blocks up; returns how many were, all where the store's client can be used."""
        keys = self._pool.store_keys(names)
        for start in range(0, len(keys), _KEYS_A_CALL):
            part = keys[start : start + _KEYS_A_CALL]
            for _ in range(times):
                found = await self._call("batch_get_replica_desc", part)
                if not found and not await self._answers(part):
                    return start
        return len(keys)

    async def _answers(self, keys: list[str]) -> bool:
        """Whether the store has none of these keys; else its master is away."""
        there = await self._call("batch_is_exist", keys)
        if there and min(there) >= 0:
            return True
        self._lose_client("the master does not answer")
        return False

    async def _locate(self, names: Sequence[bytes]) -> list[Tier | None] | None:
        try:
            return await self._pool.locate(names)
        except (httpx.HTTPError, ValueError, msgspec.MsgspecError) as error:
            _log.debug("the store's master does not say where blocks lie", error=repr(error))
            return None

    async def _see_what_came(self, now_s: float) -> None:
        for coming in list(self._coming):
            names = list(coming.names)
            tiers = await self._locate(names) or [Tier.SSD] * len(names)
            brought, gone = [], []
            for name, tier in zip(names, tiers, strict=True):
                if tier is Tier.SSD:
                    continue
                key = coming.names.pop(name)
                if tier is None:
                    gone.append(key)
                else:
                    brought.append(key)
                    self._pool.learn(name, tier)
            self.brought += len(brought)
            if brought or gone:
                await self._streams.report(Found(0.0, coming.number, brought, (), gone))
            if not coming.names or now_s > coming.until_s:
                self.not_brought += len(coming.names)
                self._coming.remove(coming)
            elif not brought:
                # It takes none while it is too full, and forgets that it was asked.
                await self._look_up(list(coming.names), 1)

    async def _call(self, name: str, keys: list[str]) -> Any:
        """Call the store's client in its thread; None where it cannot be used."""
        if self._client is None and not await self._connect():
            return None
        try:
            work = getattr(self._client, name)
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, keys)
        except Exception as error:
            # A foreign library's: whatever it raises, the next call is made by a new one.
            self._lose_client(repr(error))
            return None

    async def _connect(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._client_again_s:
            return False
        self._client_again_s = now_s + CLIENT_AGAIN_S
        try:
            self._client = await asyncio.get_running_loop().run_in_executor(self._thread, self._new_client)
        except Exception as error:
            self._lose_client(repr(error))
            return False
        self.client_away = False
        return True

    def _new_client(self) -> StoreClient:
        # Its twenty attempts would take a minute and a half, each longer than all that waits for this thread.
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        client: StoreClient = importlib.import_module(self._module).MooncakeDistributedStore()
        status = client.setup(
            self._host, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, "tcp", "", self._address
        )  # no segment of its own: it only asks
        if status != 0:
            raise ConnectionError(f"the master at {self._address} was not reached: {status}")
        return client

    def _lose_client(self, why: str) -> None:
        if not self.client_away:
            _log.warning(
                "blocks on SSD are not brought to DRAM: the store's client cannot be used",
                client=self._module,
                address=self._address,
                error=why,
            )
        self.client_away = True
        self._let_go()

    def _let_go(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            # In its thread, behind calls that are under way: a closed client must not be called any more.
            self._thread.submit(client.close)
