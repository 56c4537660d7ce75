"""MooncakeStoreConnector: KV beyond local HBM is looked up in, fetched from and put into the shared store.

Behaviour after vLLM 0.32 `kv_connector/v1/mooncake/store/`: one lookup a request, loads and saves beside
the model's steps, saves of whole prompt blocks once they are computed (and of generated ones with
`save_decode_cache`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram

from mooncake_core.store_keys import store_key
from mooncake_simulator.engine.connectors.base import EngineHandle, KvConnector
from mooncake_simulator.engine.http_client import CallError, HttpClient
from mooncake_simulator.engine.options import ConnectorOptions, EngineOptions, OptionsError
from mooncake_simulator.engine.pool import Stored
from mooncake_simulator.engine.sequence import Sequence, State
from mooncake_simulator.store import calls
from mooncake_simulator.store.node import Node
from mooncake_simulator.store.sizes import SizeError, parse_size

LOG = logging.getLogger(__name__)

_UNREACHABLE = (CallError, OSError, TimeoutError)
_TRANSFER_TIMEOUT_S = 120.0


class StoreSettings:
    """`MOONCAKE_CONFIG_PATH`: where the master is, and whether the engine lends memory itself."""

    def __init__(self, path: str | None) -> None:
        if not path:
            raise OptionsError(
                "MOONCAKE_CONFIG_PATH: MooncakeStoreConnector needs it; point it to its JSON file"
            )
        try:
            document: Any = json.loads(Path(path).read_text())
            self.master = str(document["master_server_address"])
            self.embedded = document.get("mode", "embedded") == "embedded"
            self.segment_bytes = parse_size(document.get("global_segment_size", 0))
        except (OSError, json.JSONDecodeError, KeyError, TypeError, SizeError) as error:
            raise OptionsError(f"MOONCAKE_CONFIG_PATH {path}: {error!r}") from error


class StoreMetrics:
    """`vllm:mooncake_store_operation_*`."""

    def __init__(self, engine: EngineHandle) -> None:
        registry = engine.metrics.registry
        self._labels = {"model_name": engine.options.served_model_names[0], "engine": "0"}
        names = ("model_name", "engine", "operation", "status")
        prefix = "vllm:mooncake_store_operation"
        self._calls = Counter(f"{prefix}", "Mooncake store operations.", names, registry=registry)
        self._keys = Counter(f"{prefix}_keys", "Keys of those.", names, registry=registry)
        self._bytes = Counter(f"{prefix}_bytes", "Bytes of those.", names, registry=registry)
        self._seconds = Histogram(f"{prefix}_time_seconds", "Time of those.", names, registry=registry)

    def record(self, operation: str, ok: bool, keys: int, size_bytes: int, seconds: float) -> None:
        """Account for one operation: lookup_exists, save_put or load_get."""
        labels = {**self._labels, "operation": operation, "status": "ok" if ok else "error"}
        self._calls.labels(**labels).inc()
        self._keys.labels(**labels).inc(keys)
        self._bytes.labels(**labels).inc(size_bytes)
        self._seconds.labels(**labels).observe(seconds)


class MooncakeStoreConnector(KvConnector):
    """One engine's client of the store."""

    def __init__(self, engine: EngineHandle, options: ConnectorOptions) -> None:
        super().__init__(engine)
        settings = StoreSettings(engine.options.store_config_path)
        self._options = options
        self._save_decode = bool(options.extra.get("save_decode_cache", False))
        self._lookups = bool(options.extra.get("enable_lookup", True))
        self._master = HttpClient(f"http://{settings.master}", timeout_s=5)
        self._nodes: dict[str, HttpClient] = {}
        self._to_hbm = engine.link(engine.options.profile.dram_to_hbm_bytes_per_s)
        self._metrics = StoreMetrics(engine)
        self._hit_blocks: dict[str, int] = {}
        """Leading blocks found in the store, by request; there once the lookup has ended."""
        self._loads: dict[str, tuple[int, int]] = {}
        self._saved: dict[str, int] = {}
        self._node = _embedded_node(settings, engine.options)

    async def start(self) -> None:
        if self._node is not None:
            options = self.engine.options
            await self._node.start(options.host, 0, 0, options.host_ip)

    async def stop(self) -> None:
        if self._node is not None:
            await self._node.stop()
        for client in (self._master, *self._nodes.values()):
            client.close()

    def submitted(self, sequence: Sequence) -> None:
        remote = (sequence.transfer or {}).get("do_remote_prefill")
        usable = self._usable_blocks(sequence)
        if not self._options.consumes or not self._lookups or remote or not usable:
            self._hit_blocks[sequence.id] = 0
        else:
            self.engine.spawn(self._lookup(sequence, usable))

    def matched_tokens(self, sequence: Sequence, local_tokens: int) -> int | None:
        size = self.engine.options.block_size
        if local_tokens >= self._usable_blocks(sequence) * size:
            return 0
        hit = self._hit_blocks.get(sequence.id)
        if hit is None:
            return None
        external = hit * size - local_tokens
        if external <= 0:
            return 0
        # Asked once: after a preemption the answer would be stale.
        self._hit_blocks[sequence.id] = 0
        self._loads[sequence.id] = (local_tokens // size, hit)
        return external

    def load(self, sequence: Sequence) -> None:
        first, end = self._loads.pop(sequence.id)
        self._saved[sequence.id] = end
        self.engine.spawn(self._fetch(sequence, first, end))

    def prefilled(self, sequence: Sequence) -> None:
        if self._options.produces and not sequence.received:
            self._save(sequence, sequence.prompt_tokens // self.engine.options.block_size)

    def finished(self, sequence: Sequence, finish_reason: str) -> None:
        if self._save_decode and self._options.produces and sequence.output_tokens:
            if sequence.received:
                # The prefill engine has put the prompt's blocks.
                self._saved[sequence.id] = sequence.prompt_tokens // self.engine.options.block_size
            self._save(sequence, sequence.stored)
        for record in (self._hit_blocks, self._saved, self._loads):
            record.pop(sequence.id, None)

    def _usable_blocks(self, sequence: Sequence) -> int:
        return (len(sequence.tokens) - 1) // self.engine.options.block_size

    def _save(self, sequence: Sequence, end: int) -> None:
        first = self._saved.get(sequence.id, 0)
        if end <= first:
            return
        self._saved[sequence.id] = end
        size = self.engine.options.block_size
        hashes = sequence.names.hashes
        blocks = Stored(
            hashes=tuple(hashes[first:end]),
            parent=hashes[first - 1] if first else None,
            tokens=tuple(sequence.tokens[first * size : end * size]),
        )
        self.engine.spawn(self._put(blocks))

    async def _lookup(self, sequence: Sequence, usable: int) -> None:
        keys = self._keys(sequence.names.hashes[:usable])
        started = time.monotonic()
        hit = 0
        ok = True
        try:
            found = await self._master.call("/rpc/exists", calls.Keys(keys=keys))
            assert isinstance(found, list)
            hit = found.index(False) if False in found else len(found)
        except _UNREACHABLE as error:
            ok = False
            LOG.warning(
                "store: lookup failed, %s is computed: %s", sequence.id, error or type(error).__name__
            )
        self._metrics.record("lookup_exists", ok, len(keys), 0, time.monotonic() - started)
        if sequence.state is not State.FINISHED:
            self._hit_blocks[sequence.id] = hit
            self.engine.wake()

    async def _fetch(self, sequence: Sequence, first: int, end: int) -> None:
        started = time.monotonic()
        keys = self._keys(sequence.names.hashes[first:end])
        size = self.engine.options.block_size
        arrived = 0
        try:
            found = await self._master.call("/rpc/get", calls.Keys(keys=keys))
            assert isinstance(found, list)
            there = found[: found.index(None)] if None in found else found
            arrived = await self._carry([tuple(one) for one in there])
            tiers = [ssd for _, ssd, _ in there[:arrived]]
            by_source = self.engine.metrics.cached_by_source
            by_source["disk"].inc(tiers.count(True) * size)
            by_source["host"].inc(tiers.count(False) * size)
        except _UNREACHABLE as error:
            LOG.warning("store: %s is computed: %s", sequence.id, error or type(error).__name__)
        size_bytes = arrived * size * self.engine.options.profile.kv_bytes_per_token
        seconds = time.monotonic() - started
        self._metrics.record("load_get", arrived == len(keys), len(keys), size_bytes, seconds)
        self.engine.loaded(sequence, arrived * size)

    async def _carry(self, places: SequenceOf[tuple[str, bool, int]]) -> int:
        """Bring objects here; returns how many leading ones arrived."""
        groups: dict[tuple[str, bool], int] = defaultdict(int)
        for segment, ssd, size_bytes in places:
            groups[segment, ssd] += size_bytes
        total = sum(groups.values())
        ways = [self._transfer(segment, ssd, size) for (segment, ssd), size in groups.items()]
        results = await asyncio.gather(*ways, self._to_hbm.carry(total), return_exceptions=True)
        failed = {
            group for group, result in zip(groups, results, strict=False) if isinstance(result, BaseException)
        }
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _UNREACHABLE):
                raise result
        for index, (segment, ssd, _) in enumerate(places):
            if (segment, ssd) in failed:
                return index
        return len(places)

    async def _put(self, blocks: Stored) -> None:
        started = time.monotonic()
        options = self.engine.options
        each = options.block_size * options.profile.kv_bytes_per_token
        keys = self._keys(blocks.hashes)
        preferred = self._node.name if self._node is not None else None
        put: list[int] = []
        written: list[int] = []
        try:
            wanted = calls.PutStart(objects=[(key, each) for key in keys], preferred=preferred)
            placed = await self._master.call("/rpc/put_start", wanted)
            assert isinstance(placed, list)
            put = [index for index, segment in enumerate(placed) if segment is not None]
            await self._write(keys, placed, put, each, written)
        except _UNREACHABLE as error:
            LOG.warning(
                "store: %d blocks not put: %s", len(put) - len(written), error or type(error).__name__
            )
            ok = False
        else:
            ok = True
        # Also where the rest failed: nobody will tell of these blocks a second time.
        self._announce(blocks, sorted(written))
        self._metrics.record("save_put", ok, len(put), len(put) * each, time.monotonic() - started)

    async def _write(
        self, keys: list[str], placed: list[Any], put: list[int], each: int, written: list[int]
    ) -> None:
        """Write what was placed, segment by segment; `written` grows with each that took its blocks."""
        by_segment: dict[str, list[int]] = defaultdict(list)
        for index in put:
            by_segment[placed[index]].append(index)
        failure: Exception | None = None
        for segment, indexes in by_segment.items():
            names = calls.Keys(keys=[keys[index] for index in indexes])
            try:
                await self._transfer(segment, False, len(indexes) * each)
            except _UNREACHABLE as error:
                failure = error
                await self._master.call("/rpc/put_revoke", names)
                continue
            ended = await self._master.call("/rpc/put_end", names)
            assert isinstance(ended, list)
            written += [index for index, there in zip(indexes, ended, strict=True) if there]
        if failure is not None:
            raise failure

    def _announce(self, blocks: Stored, put: list[int]) -> None:
        size = self.engine.options.block_size
        for index in put:
            self.engine.publish_store_copy(
                Stored(
                    hashes=(blocks.hashes[index],),
                    parent=blocks.hashes[index - 1] if index else blocks.parent,
                    tokens=blocks.tokens[index * size : (index + 1) * size],
                )
            )

    async def _transfer(self, segment: str, ssd: bool, size_bytes: int) -> None:
        client = self._nodes.get(segment)
        if client is None:
            client = self._nodes[segment] = HttpClient(f"http://{segment}", timeout_s=_TRANSFER_TIMEOUT_S)
        await client.call("/transfer", calls.Transfer(size_bytes=size_bytes, ssd=ssd))

    def _keys(self, hashes: SequenceOf[bytes]) -> list[str]:
        return [store_key(self.engine.options.model, block_hash) for block_hash in hashes]


def _embedded_node(settings: StoreSettings, options: EngineOptions) -> Node | None:
    if not settings.embedded or not settings.segment_bytes:
        return None
    return Node(
        settings.master,
        capacity_bytes=settings.segment_bytes,
        ssd_capacity_bytes=0,
        profile=options.profile,
        time_scale=options.time_scale,
    )
