"""The KV cache pool in the index: what this engine has put there, as long as the store's master has it.

Several sidecars write for one pool. They share its registration (`Registry.join`) and so its epoch; a block
is in the pool or it is not, whoever put it there, so that writing it twice changes nothing. Their writes are
numbered by one counter in Redis, because the index carries out a number once only: who finds a higher number
there takes another and writes again.

Engines tell what they put into the store and never what it evicts (engines.md §2), so each sidecar asks the
master in turns about the blocks that it has told of. What is gone is removed, what is there is written again:
this also heals what another sidecar removed in the moment in which it came back. When an instance leaves for
good, another sidecar asks in its place (`succession`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set

import httpx
import msgspec
import structlog

from mooncake_core.index import Change, PrefixIndex, Removed, Source, Stored, Tier
from mooncake_core.registry import EngineKind, Instance, Registry, Role, StaleEpochError
from mooncake_core.resp import RespClient
from mooncake_core.store_keys import store_key
from mooncake_sidecar.engine.mirror import Shared
from mooncake_sidecar.engine.residency import Residency
from mooncake_sidecar.engine.succession import Succession

_log = structlog.get_logger(__name__)

CHECK_EVERY_S = 2.0
"""Wall seconds between two calls of `check`."""
_KEYS_A_QUERY = 32
"""The master takes keys in the query string: a hundred bytes each."""
_QUERIES_A_ROUND = 16
_FRESH_S = 1.0
"""A block just told of may still be under way to the store."""
_ALL_GONE = 16
"""So many blocks asked about and none there: maybe the master has lost its memory, not evicted some."""
_WRITE_ATTEMPTS = 16


class Pool:
    """One engine's part in the pool.

    Args:
        record: the pool's registration, as this sidecar would write it; its URL is the master's.
        model: path or name under which the engine loaded its model: the store's keys begin with it.
        registry: where the pool is registered.
        index: where its blocks are written.
        client: for the counter of writes.
        namespace: prefix of the counter's key.
        residency: what this engine has put into the pool.
        instance: of the engine.
    """

    def __init__(
        self,
        record: Instance,
        model: str,
        *,
        registry: Registry,
        index: PrefixIndex,
        client: RespClient,
        namespace: str,
        residency: Residency,
        instance: str,
    ) -> None:
        self.succession = Succession(client, registry, namespace=namespace, pool=record.id, instance=instance)
        self.master_away = False
        self.gone = 0
        """Blocks that the master had no more."""
        self._record = record
        self._model = model
        self._registry = registry
        self._index = index
        self._client = client
        self._counter = f"mc:{{{namespace}}}:writes:{record.id}"
        self._residency = residency
        self._http = httpx.AsyncClient(base_url=record.url, timeout=5.0, trust_env=False)
        self._source: Source | None = None
        self._unchecked: OrderedDict[bytes, tuple[int, Tier, float]] = OrderedDict()
        """Digest → key, tier, not to be asked about before; least recently checked first."""
        self._by_key: dict[int, bytes] = {}
        """Digest of each of them by its key."""
        self._inherited: set[bytes] = set()
        """Those among them that were taken over and not asked about since."""
        self._outbox: list[Change] = []
        self._told: dict[bytes, Shared] = {}
        """Blocks of the outbox that the successor must be able to find."""
        self._gone: list[bytes] = []
        """Blocks that it need not look for any more, once the outbox is written."""

    @property
    def blocks(self) -> int:
        """Blocks believed to be in the pool that this sidecar answers for."""
        return len(self._unchecked)

    def tell(self, shared: Iterable[Shared]) -> None:
        """The engine says that it has put blocks there."""
        by_tier: dict[Tier, list[int]] = {}
        not_before_s = time.monotonic() + _FRESH_S
        for block in shared:
            name, key, tier = block
            self._told[name] = block
            self._unchecked[name] = (key, tier, not_before_s)
            self._by_key[key] = name
            by_tier.setdefault(tier, []).append(key)
        self._outbox += [Stored(keys, tier) for tier, keys in by_tier.items()]

    def known(self, keys: Iterable[int]) -> dict[bytes, int]:
        """Those blocks among `keys` that this sidecar answers for: their keys by the engine's hashes."""
        return {name: key for key in keys if (name := self._by_key.get(key)) is not None}

    def store_keys(self, names: Iterable[bytes]) -> list[str]:
        """How the store calls blocks."""
        return [store_key(self._model, name) for name in names]

    async def beat(self) -> None:
        """Keep the pool registered; take part in its registration where there is none.

        Raises:
            ConnectionError: the registry is away.
        """
        if self._source is not None:
            try:
                await self._registry.heartbeat(self._record.id, self._source.epoch)
                return
            except StaleEpochError:
                self._source = None
        await self._enter((await self._registry.join(self._record)).epoch)

    async def flush(self) -> None:
        """Write what was told; nothing before the first `beat`.

        Raises:
            ConnectionError: the index is away; what was told is kept.
        """
        if not self._outbox or self._source is None:
            return
        writing, self._outbox = self._outbox, []
        told, self._told = self._told, {}
        gone, self._gone = self._gone, []
        try:
            await self.succession.add(told.values())
            await self._write(self._source, writing)
            await self.succession.drop([name for name in gone if name not in self._unchecked])
        except BaseException as error:
            self._outbox = writing + self._outbox
            self._told = told | self._told
            self._gone = gone + self._gone
            if isinstance(error, StaleEpochError):
                self._source = None
                return
            raise

    async def check(self) -> None:
        """Ask the master about the blocks that were not asked about for longest, those of who left included.

        Raises:
            ConnectionError: the registry or the index is away.
        """
        if self._source is None:
            return
        self._take_over(await self.succession.inherit())
        asked_at_s = time.monotonic()
        asked = self._longest_unasked(asked_at_s)
        try:
            found = await self.locate(asked)
            lost_all = await self._has_lost_all(asked, found)
            kept = await self._newly_there(asked) if lost_all else set()
        except (httpx.HTTPError, ValueError, msgspec.MsgspecError) as error:
            if not self.master_away:
                _log.warning("the store's master does not answer", url=self._record.url, error=repr(error))
            self.master_away = True
            return
        self.master_away = False
        if lost_all:
            _log.warning("the store has lost all blocks that were asked about", blocks=len(asked))
            await self._begin_new_epoch(asked_at_s, kept)
        for name, tier in zip(asked, found, strict=True):
            if not self._is_fresh(name, asked_at_s):
                self.learn(name, tier)

    async def close(self) -> None:
        """Drop the connections; the pool stays registered by others, or ends."""
        await self._http.aclose()

    def _take_over(self, blocks: Iterable[Shared]) -> None:
        for block in blocks:
            if block.hash not in self._unchecked:
                self._unchecked[block.hash] = (block.key, block.tier, 0.0)
                self._unchecked.move_to_end(block.hash, last=False)
                self._by_key[block.key] = block.hash
                self._inherited.add(block.hash)

    def _forget_key(self, key: int, name: bytes) -> None:
        # An engine that hashes otherwise since its restart has put the same tokens there by another name.
        if self._by_key.get(key) == name:
            del self._by_key[key]

    async def _enter(self, epoch: int) -> None:
        """Write under an epoch of the pool from now on; what this engine knows of it is written again."""
        source = Source(self._record.id, epoch)
        await self._index.attach(source)
        self._source = source
        self._record = msgspec.structs.replace(self._record, epoch=epoch)
        self._outbox.clear()
        self._told.clear()
        self.tell(self._residency.mirror.shared())
        _log.info("pool joined", pool=source.instance, epoch=epoch, blocks=self.blocks)

    def _longest_unasked(self, now_s: float) -> list[bytes]:
        """Blocks to ask about: not those that may still be under way to the store."""
        due = (name for name in self._unchecked if not self._is_fresh(name, now_s))
        return list(itertools.islice(due, _KEYS_A_QUERY * _QUERIES_A_ROUND))

    def _is_fresh(self, name: bytes, asked_at_s: float) -> bool:
        """Whether it was told of so late that what the master said from that moment on is no answer to it."""
        known = self._unchecked.get(name)
        return known is not None and known[2] > asked_at_s

    async def _has_lost_all(self, asked: Sequence[bytes], found: Sequence[Tier | None]) -> bool:
        """Whether the master has lost its memory, from a part of the blocks of which it has none.

        A store that makes room drops those longest unused, more at once than are asked about in a round: only
        when blocks chosen from all the others are gone too, all are.
        """
        # Of blocks that nobody asked about for a while all may be gone, and the rest of the store be well.
        own = sum(name not in self._inherited for name in asked)
        if own < _ALL_GONE or any(found):
            return False
        others = list(self._unchecked.keys() - set(asked) - self._inherited)
        return not any(await self.locate(random.sample(others, min(len(others), _KEYS_A_QUERY))))

    async def _newly_there(self, asked: Sequence[bytes]) -> set[bytes]:
        """Blocks that came into a store after it had lost all: they will not be told of a second time."""
        new = [name for name, (_, _, not_before_s) in self._unchecked.items() if not_before_s]
        new = list(set(new[-_KEYS_A_QUERY * _QUERIES_A_ROUND :]) - set(asked))
        return {name for name, tier in zip(new, await self.locate(new), strict=True) if tier is not None}

    async def _begin_new_epoch(self, asked_at_s: float, kept: Set[bytes]) -> None:
        """The store has lost what it was asked about: all sidecars shall ask again before they tell of it.

        What the engine has put there since, or so lately that it may be under way, is asked about later.
        """
        # What may fail comes first: as long as nothing is forgotten the loss is found again.
        await self.succession.drop_all()
        registered = await self._registry.register(self._record)
        lost = [name for name in self._unchecked if name not in kept and not self._is_fresh(name, asked_at_s)]
        for name in lost:
            self._forget_key(self._unchecked.pop(name)[0], name)
        self._inherited.clear()
        self._gone.clear()
        for tier in (Tier.DRAM, Tier.SSD):
            self._residency.pool_lost(lost, tier)
        await self._enter(registered.epoch)

    async def _write(self, source: Source, changes: Sequence[Change]) -> None:
        for _ in range(_WRITE_ATTEMPTS):
            number = int(await self._client.call("INCR", self._counter))
            if await self._index.apply(source, changes, number) == number:
                return
        raise ConnectionError(f"{source.instance}: too many write into the pool's index at once")

    async def locate(self, names: Sequence[bytes]) -> list[Tier | None]:
        """In which tier the master has each block; None = not at all. This does not count as reading it.

        Raises:
            httpx.HTTPError, ValueError, msgspec.MsgspecError: the master does not answer, or nonsense.
        """
        found: list[Tier | None] = []
        for start in range(0, len(names), _KEYS_A_QUERY):
            keys = self.store_keys(names[start : start + _KEYS_A_QUERY])
            answer = await self._http.get("/batch_query_keys", params={"keys": ",".join(keys)})
            answer.raise_for_status()
            data = msgspec.json.decode(answer.content, type=_Answer).data
            found += [_tier(data.get(key)) for key in keys]
        return found

    def learn(self, name: bytes, tier: Tier | None) -> None:
        """Somebody has seen where the store has a block, None = nowhere: the index shall hear of it."""
        self._inherited.discard(name)
        known = self._unchecked.pop(name, None)
        if known is None:
            return
        key, before, _ = known
        if tier is None:
            self.gone += 1
            self._forget_key(key, name)
            self._gone.append(name)
            self._outbox.append(Removed([key], before))
            self._residency.pool_lost([name], before)
            return
        if tier is not before:
            self._told[name] = Shared(name, key, tier)
            self._outbox.append(Removed([key], before))
            self._residency.pool_moved(name, tier)
        self._outbox.append(Stored([key], tier))
        self._unchecked[name] = (key, tier, 0.0)


def pool_record(identity: str, url: str, engine: Instance) -> Instance:
    """The registration of the pool that an engine uses."""
    return Instance(
        id=identity,
        role=Role.STORE,
        url=url,
        cluster=engine.cluster,
        pool=identity,
        model=engine.model,
        engine=EngineKind.STORE,
        block_size_tokens=engine.block_size_tokens,
    )


class _Found(msgspec.Struct):
    ok: bool = False
    values: list[msgspec.Raw] | None = None
    """Null where the key is not there."""


class _Answer(msgspec.Struct):
    data: dict[str, _Found]


def _tier(found: _Found | None) -> Tier | None:
    if found is None or not found.ok:
        return None
    # The master lists copies in memory; a block that it knows and lists nowhere lies on SSD.
    return Tier.DRAM if found.values else Tier.SSD
