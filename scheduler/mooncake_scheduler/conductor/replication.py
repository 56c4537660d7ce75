"""Which hot blocks are copied to another host, and which copies are given up again. Pure: no clock, no I/O.

Reads of a block queue at the hosts that hold it. At a host that is busy for a share ρ of the time, reads of
even length wait ρ²/(2(1−ρ)) seconds every second (M/D/1). A copy takes part of the reads to another host: it
is worth its price where what is saved for as long as the heat is expected to last exceeds the seconds that
the copy itself keeps two hosts busy. Blocks are looked at in runs (superblocks): what is hot is a beginning
that many prompts share, not a single block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from heapq import nlargest
from math import exp
from typing import NamedTuple, TypeAlias

Host: TypeAlias = str | int

SUPERBLOCK_BLOCKS = 16
"""Blocks of a run, counted from the start of a prompt; a rest is not looked at."""
MOST_RUNS = 20_000
"""Then those that were read longest ago are forgotten."""
_LOOKED_AT = 256
"""Runs that may be copied in one plan, the hottest ones."""
_FULL = 0.95
"""From this share on the wait grows evenly: what is overloaded must still compare."""
_RELEASED_BELOW = 0.25
"""A copy is given up when it saves less than this part of its price: copies must not come and go."""


class Copy(NamedTuple):
    """A run of blocks is wanted on another host."""

    keys: Sequence[int]
    source: Host
    target: Host


class Release(NamedTuple):
    """A copy is not worth its room any longer."""

    keys: Sequence[int]
    host: Host


class _Run:
    __slots__ = ("changed_s", "coming", "copies", "hits", "keys", "read_s")

    def __init__(self, keys: Sequence[int], now_s: float) -> None:
        self.keys = keys
        self.hits = 0.0
        self.read_s = now_s
        self.changed_s = float("-inf")
        self.copies: list[Host] = []
        """Hosts to which it was copied, besides the one it came to by itself."""
        self.coming = False
        """Whether the last of these copies is still on its way."""


class Replication:
    """Heat of runs, and what follows from it.

    Args:
        block_s: seconds that a host's network is busy with one block.
        most_replicas: of a run, the first one counted.
        most_blocks: that copies may take up in all.
        memory_s: how long a read is remembered, and heat is expected to last.
        cool_down_s: a run that was copied or released is left alone for so long.
    """

    def __init__(
        self,
        block_s: float,
        *,
        most_replicas: int = 4,
        most_blocks: int = 4_096,
        memory_s: float = 60.0,
        cool_down_s: float = 10.0,
    ) -> None:
        self._block_s = block_s
        self._most_replicas = most_replicas
        self._most_blocks = most_blocks
        self._memory_s = memory_s
        self._cool_down_s = cool_down_s
        self._runs: dict[int, _Run] = {}
        self.copied_blocks = 0
        """Blocks that copies take up."""

    def read(self, keys: Sequence[int], first: int, end: int, now_s: float) -> None:
        """The blocks from `first` up to `end` of a prompt were read from their hosts.

        Args:
            keys: block keys of the prompt, from its start.
            first: place of the first block that was read.
            end: place behind the last one.
            now_s: when.
        """
        size, runs = SUPERBLOCK_BLOCKS, self._runs
        for begin in range(-(-first // size) * size, end - size + 1, size):
            name = keys[begin + size - 1]
            run = runs.pop(name, None)
            if run is None:
                run = _Run(tuple(keys[begin : begin + size]), now_s)
            run.hits = self._hits(run, now_s) + 1
            run.read_s = now_s
            runs[name] = run
        while len(runs) > MOST_RUNS:
            oldest = next((name for name, run in runs.items() if not run.copies), None)
            if oldest is None:
                break
            del runs[oldest]

    def plan(
        self, now_s: float, hosts: Collection[Host], homes: Mapping[int, Sequence[Host]]
    ) -> tuple[list[Copy], list[Release]]:
        """What to copy now, and what to release. Both count as done; a copy is there once `homes` says so.

        Args:
            now_s: the time.
            hosts: that can take a copy.
            homes: the hosts that hold a block, the one it came to first; blocks in none are left out.
        """
        busy: dict[Host, float] = dict.fromkeys(hosts, 0.0)
        hot: list[tuple[float, int, _Run, list[Host]]] = []
        for name, run in self._runs.items():
            holders = self._holders(run, homes, busy)
            load = self._hits(run, now_s) / self._memory_s * len(run.keys) * self._block_s
            run.coming = run.coming and run.copies[-1] not in holders
            for host in holders:
                busy[host] += load / len(holders)
            if not holders and run.copies:
                self.copied_blocks -= len(run.copies) * len(run.keys)
                run.copies.clear()
                run.coming = False
            if holders:
                hot.append((load, name, run, holders))
        releases = self._releases(now_s, hot, busy)
        return self._copies(now_s, hot, busy), releases

    def lost(self, host: Host) -> None:
        """A host is gone, with all copies on it."""
        for run in self._runs.values():
            if host in run.copies:
                run.coming = run.coming and run.copies[-1] != host
                run.copies.remove(host)
                self.copied_blocks -= len(run.keys)

    def counts(self, copy: Copy) -> bool:
        """Whether a copy that arrives is still wanted: one that took longer than heat lasts is not."""
        run = self._runs.get(copy.keys[-1])
        return run is not None and copy.target in run.copies

    def _releases(
        self, now_s: float, hot: list[tuple[float, int, _Run, list[Host]]], busy: dict[Host, float]
    ) -> list[Release]:
        releases = []
        for load, _, run, holders in hot:
            if not run.copies or now_s - run.changed_s < (
                self._memory_s if run.coming else self._cool_down_s
            ):
                continue
            host = run.copies[-1]
            if host not in holders:
                run.coming = False
                run.copies.pop()
                self.copied_blocks -= len(run.keys)
                continue
            if len(holders) < 2:
                continue
            fewer = [each for each in holders if each != host]
            saved = self._moved(busy, holders, fewer, load)
            if saved * self._memory_s < _RELEASED_BELOW * self._price_s(run):
                _shift(busy, holders, fewer, load)
                holders.remove(host)
                run.copies.pop()
                run.changed_s = now_s
                self.copied_blocks -= len(run.keys)
                releases.append(Release(run.keys, host))
        return releases

    def _copies(
        self, now_s: float, hot: list[tuple[float, int, _Run, list[Host]]], busy: dict[Host, float]
    ) -> list[Copy]:
        copies = []
        for load, _, run, holders in nlargest(_LOOKED_AT, hot, key=lambda each: each[:2]):
            if run.coming or now_s - run.changed_s < self._cool_down_s:
                continue
            if len(holders) >= self._most_replicas:
                continue
            if self.copied_blocks + len(run.keys) > self._most_blocks:
                continue
            target = min((host for host in busy if host not in holders), key=busy.__getitem__, default=None)
            if target is None:
                continue
            more = [*holders, target]
            saved = -self._moved(busy, holders, more, load)
            if saved * self._memory_s <= self._price_s(run):
                continue
            copies.append(Copy(run.keys, min(holders, key=busy.__getitem__), target))
            _shift(busy, holders, more, load)
            run.copies.append(target)
            run.coming = True
            run.changed_s = now_s
            self.copied_blocks += len(run.keys)
        return copies

    def _holders(
        self, run: _Run, homes: Mapping[int, Sequence[Host]], busy: Mapping[Host, float]
    ) -> list[Host]:
        """Hosts that hold all of a run."""
        holders: list[Host] | None = None
        for key in run.keys:
            here = homes.get(key, ())
            holders = [h for h in here if h in busy] if holders is None else [h for h in holders if h in here]
        return holders or []

    def _hits(self, run: _Run, now_s: float) -> float:
        return run.hits * exp((run.read_s - now_s) / self._memory_s)

    def _price_s(self, run: _Run) -> float:
        """A copy keeps its source and its target busy."""
        return 2 * len(run.keys) * self._block_s

    @staticmethod
    def _moved(
        busy: Mapping[Host, float], holders: Sequence[Host], others: Sequence[Host], load: float
    ) -> float:
        """How much longer is waited, every second, when `others` serve a load instead of `holders`."""
        after = {host: busy[host] for host in {*holders, *others}}
        before = sum([_wait(after[host]) for host in sorted(after, key=str)])
        _shift(after, holders, others, load)
        return sum([_wait(after[host]) for host in sorted(after, key=str)]) - before


def _shift(busy: dict[Host, float], holders: Sequence[Host], others: Sequence[Host], load: float) -> None:
    for host in holders:
        busy[host] = max(0.0, busy[host] - load / len(holders))
    for host in others:
        busy[host] += load / len(others)


def _wait(busy: float) -> float:
    """Seconds waited every second at a host that is busy for this share of the time."""
    if busy < _FULL:
        return busy * busy / (2 * (1 - busy))
    full = _FULL * _FULL / (2 * (1 - _FULL))
    slope = (2 * _FULL - _FULL * _FULL) / (2 * (1 - _FULL) ** 2)
    return full + slope * (busy - _FULL)
