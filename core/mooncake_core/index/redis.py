"""The prefix index on Redis: shared by all schedulers of a cluster, outliving each of them (ADR 0010)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from mooncake_core.blocks import pack_keys
from mooncake_core.index.contract import Change, Depth, Source, Stored
from mooncake_core.index.stats import CHECKS, IndexStats
from mooncake_core.registry.contract import StaleEpochError
from mooncake_core.resp import Argument, Reply, ReplyError, RespClient, Script, UnavailableError

_KEY_BYTES = 8
_WORD_BYTES = 2
_KEYS_PER_CALL = 256
"""A script blocks Redis for everyone: one call of so many keys takes about a millisecond."""
_MOST_LOOKS = 512
_DEEPEST = 8
_FIRST_BUCKETS = 256
_BESIDE_BUCKETS = (b"", b":sources", b":live", b":stale", b":sweeping", b":free")
_BUCKET_BLOCKS = 128
_DEFAULT_VALUE_BYTES = 64
_DEFAULT_ENTRIES = 512


def _script(name: str) -> Script:
    folder = resources.files("mooncake_core.index").joinpath("lua")
    return Script("\n".join(folder.joinpath(f"{part}.lua").read_text() for part in ("layout", name)))


_SOURCE, _APPLY, _MATCH, _SWEEP = (_script(name) for name in ("source", "apply", "match", "sweep"))


class SlotsExhaustedError(Exception):
    """8 191 lives are attached or await the sweep: `sweep` has to clear some before another can begin."""


class _Limits(NamedTuple):
    """What this Redis keeps in its compact form; beyond, a bucket takes five times the memory."""

    holders: int
    bucket_blocks: int


class RedisIndex:
    """`PrefixIndex` over one Redis ≥ 6.2 or Valkey: about 16 bytes a block and 2 for each further holder.

    A block lists as many holders as `hash-max-ziplist-value` leaves room for (31 at its default of 64 bytes,
    511 at 1 024, to which the operator's own Redis is set); where it has more, matches that meet it count as
    `stats.overflows`, and the rest of its holders is not known.

    Exact for prefixes without holes, for the `deepest` deepest holders; for the others a lower bound.

    Args:
        client: a connected client; stays the caller's.
        namespace: what shares keys: cluster, model and block size, in any spelling without braces.
        timeout_s: budget of a match, in wall seconds.
        write_timeout_s: budget of one script call of a write.
        deepest: holders whose depth `match` finds exactly before it stops.
    """

    def __init__(
        self,
        client: RespClient,
        *,
        namespace: str,
        timeout_s: float = 0.005,
        write_timeout_s: float = 1.0,
        deepest: int = _DEEPEST,
    ) -> None:
        if set(namespace) & set("{}"):
            raise ValueError(f"namespace {namespace!r}: braces mark the hash tag of its keys; leave them out")
        self.stats = IndexStats()
        self._client = client
        self._root = f"mc:{{{namespace}}}:index".encode()
        self._roots = (self._root,)
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        self._deepest = deepest
        self._limits: _Limits | None = None
        self._limits_of: str | None = None

    async def attach(self, source: Source) -> None:
        answer = await self._write(_SOURCE, b"attach", source.instance, source.epoch)
        if answer == 0:
            raise StaleEpochError(f"{source.instance}: an epoch after {source.epoch} is attached")
        if answer < 0:
            raise SlotsExhaustedError(
                f"{source.instance} cannot be attached: all slots of the index wait for the sweep"
            )

    async def detach(self, source: Source) -> None:
        await self._write(_SOURCE, b"detach", source.instance, source.epoch)

    async def sources(self) -> list[Source]:
        """The attached life of each instance."""
        reply = await self._client.call(b"HGETALL", self._root + b":sources", timeout_s=self._write_timeout_s)
        assert isinstance(reply, list)
        fields = [bytes(field) for field in reply]
        return [
            Source(instance.decode(), int(life.split()[0]))
            for instance, life in zip(fields[::2], fields[1::2], strict=True)
        ]

    async def apply(self, source: Source, changes: Sequence[Change], sequence: int) -> int:
        limits = await self._read_limits()
        applied: int | None = None
        # The sequence advances with the last call only: a batch that broke off is carried out again as a
        # whole, and what was done already changes nothing.
        for operations, last in _calls(changes):
            applied = await self._write(
                _APPLY, source.instance, source.epoch, sequence, int(last), *limits, *operations
            )
            if applied is None:
                raise StaleEpochError(f"epoch {source.epoch} of {source.instance} is not the attached one")
            if applied >= sequence:
                break
        assert applied is not None
        return applied

    async def match(self, keys: Sequence[int]) -> Mapping[str, Depth]:
        if not len(keys):
            return {}
        # Not by way of `match_many`: every request asks this.
        arguments = (random.getrandbits(31), CHECKS, _MOST_LOOKS, self._deepest, pack_keys(keys))
        replies = await self._client.eval(_MATCH, self._roots, arguments, timeout_s=self._timeout_s)
        return self._read(replies[0])

    async def match_many(self, requests: Sequence[Sequence[int]]) -> Sequence[Mapping[str, Depth]]:
        asked = [number for number, keys in enumerate(requests) if len(keys)]
        results: list[Mapping[str, Depth]] = [{} for _ in requests]
        if asked:
            seed = random.getrandbits(31)
            packed = [pack_keys(requests[number]) for number in asked]
            arguments: list[Argument] = [seed, CHECKS, _MOST_LOOKS, self._deepest, *packed]
            replies = await self._client.eval(_MATCH, self._roots, arguments, timeout_s=self._timeout_s)
            for number, reply in zip(asked, replies, strict=True):
                results[number] = self._read(reply)
        return results

    async def sweep(self, budget: int) -> int:
        """Clear away what ended lives have left, `budget` buckets at a time, so that their slots serve again.

        Any number of processes may sweep; they share the work. 16 buckets take about a millisecond.

        Returns:
            Ended lives still to be cleared away; 0 = nothing to do.
        """
        left: int = await self._write(_SWEEP, budget)
        return left

    async def blocks(self) -> int:
        """Blocks in the index, those only ended lives have held included until they are swept."""
        return int(await self._client.call(b"HGET", self._root, b"entries") or 0)

    async def memory_bytes(self, sample: int = 32) -> int | None:
        """What the index takes in Redis' memory, estimated from some of its buckets.

        Args:
            sample: buckets looked at; of an index with no more than these the answer is exact.

        Returns:
            Bytes; None where Redis offers no MEMORY, as some that are hosted.
        """
        buckets = int(await self._client.call(b"HGET", self._root, b"buckets") or _FIRST_BUCKETS)
        looked_at = random.sample(range(buckets), min(sample, buckets))
        names = [*_BESIDE_BUCKETS, *(b":%d" % bucket for bucket in looked_at)]
        calls = [(b"MEMORY", b"USAGE", self._root + name) for name in names]
        try:
            sizes = await self._client.call_many(calls, timeout_s=self._write_timeout_s)
        except ReplyError:
            return None
        # Nothing is said of a bucket in which there is nothing.
        taken = [int(size or 0) for size in sizes]
        beside = len(_BESIDE_BUCKETS)
        return sum(taken[:beside]) + sum(taken[beside:]) * buckets // len(looked_at)

    async def _write(self, script: Script, *arguments: Argument) -> Reply:
        return await self._client.eval(script, self._roots, arguments, timeout_s=self._write_timeout_s)

    async def _read_limits(self) -> _Limits:
        if self._limits is None or self._limits_of != self._client.run_id:
            run_id = self._client.run_id
            value_bytes = await self._setting(b"hash-max-ziplist-value", _DEFAULT_VALUE_BYTES)
            entries = await self._setting(b"hash-max-ziplist-entries", _DEFAULT_ENTRIES)
            # One word is the overflow's. A bucket fills up to twice the mean before it is split.
            holders = max(value_bytes // _WORD_BYTES - 1, 1)
            self._limits = _Limits(holders, max(min(_BUCKET_BLOCKS, entries // 4), 1))
            self._limits_of = run_id
        return self._limits

    async def _setting(self, name: bytes, default: int) -> int:
        try:
            answer = await self._client.call(b"CONFIG", b"GET", name)
        except UnavailableError:  # it will say so later
            raise
        except ReplyError:  # hosted Redis offers no CONFIG
            return default
        return int(answer[1]) if answer else default

    def _read(self, reply: list[Reply]) -> dict[str, Depth]:
        looks, holes, overflows = reply[:3]
        self.stats.count(looks=looks, holes=holes, overflows=overflows)
        return {
            reply[at].decode(): Depth(reply[at + 1], reply[at + 2], reply[at + 3])
            for at in range(3, len(reply), 4)
        }


def _calls(changes: Sequence[Change]) -> Iterator[tuple[list[Argument], bool]]:
    """Cut changes into calls of bounded size; says of each whether it is the last."""
    operations: list[Argument] = []
    room = _KEYS_PER_CALL
    for change in changes:
        tier = int(change.tier) if isinstance(change, Stored) else -int(change.tier)
        packed = memoryview(pack_keys(change.keys))
        while len(packed):
            if not room:
                yield operations, False
                operations, room = [], _KEYS_PER_CALL
            part = packed[: room * _KEY_BYTES]
            operations += [tier, bytes(part)]
            packed = packed[len(part) :]
            room -= len(part) // _KEY_BYTES
    yield operations, True
