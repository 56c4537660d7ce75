"""The shared store's tiers: everything is on SSD, a part of it in DRAM too, and SSD is slower to read.

As Mooncake's store with offloading: what is put is written to SSD behind, so that leaving DRAM costs nothing.
A block lies on the node of the instance that computed it (the store prefers the local segment).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_core.profiles import Profile
from mooncake_scheduler.conductor.replication import Copy, Replication
from mooncake_scheduler.conductor.tiering import PLAN_EVERY_S, READ_AHEAD_SHARE, Promotion, Session
from mooncake_simulator.cluster.agenda import Agenda
from mooncake_simulator.cluster.contents import Predicted, Rule, contents_of
from mooncake_simulator.cluster.links import Link
from mooncake_simulator.workloads.traces import BLOCK_TOKENS

_COPIES_PART = 20


@dataclass(frozen=True, slots=True)
class StoreTiers:
    """DRAM and SSD of the shared store."""

    dram_tokens: int
    """KV that fits into DRAM, over all nodes."""
    nodes: int = 1
    """Machines that it is spread over, each with NICs and an SSD of the profile's speed."""
    rule: Rule = "predicted"
    """What stays in DRAM, and whether anything is read ahead."""
    replicate: bool = False
    """Copy hot blocks to other nodes; a twentieth of DRAM is set aside for copies."""

    def __post_init__(self) -> None:
        if self.dram_tokens < BLOCK_TOKENS or self.nodes < 1:
            raise ValueError(
                f"a store of {self.nodes} nodes with DRAM for {self.dram_tokens} tokens: give it a node and "
                f"at least a block of {BLOCK_TOKENS}"
            )


@dataclass(slots=True)
class TierUse:
    """From where the fetched KV came, and what became of what was read ahead."""

    dram_tokens: int = 0
    ssd_tokens: int = 0
    in_time_blocks: int = 0
    late_blocks: int = 0
    wasted_blocks: int = 0
    copied_blocks: int = 0
    released_blocks: int = 0

    @property
    def promoted_blocks(self) -> int:
        """Blocks read ahead."""
        return self.in_time_blocks + self.late_blocks + self.wasted_blocks

    @property
    def wasted_share(self) -> float:
        """Of the blocks read ahead, those that nobody came for."""
        return self.wasted_blocks / max(1, self.promoted_blocks)


@dataclass(slots=True)
class _Node:
    nic: Link
    ssd: Link


@dataclass(slots=True)
class Turn:
    """A prompt on its way through the store."""

    blocks: Sequence[int]
    """Its full blocks: the store takes no others."""
    session: Session | None = None


class TieredStore:
    """Where the store's blocks lie.

    Args:
        agenda: the time.
        tiers: its size.
        profile: the speed of NICs and SSDs.
    """

    def __init__(self, agenda: Agenda, tiers: StoreTiers, profile: Profile) -> None:
        self._agenda = agenda
        self._block_bytes = BLOCK_TOKENS * profile.kv_bytes_per_token
        capacity = tiers.dram_tokens // BLOCK_TOKENS
        self._replication: Replication | None = None
        if tiers.replicate:
            copies = capacity // _COPIES_PART
            capacity -= copies
            self._block_s = self._block_bytes / profile.network_bytes_per_s
            self._replication = Replication(self._block_s, most_blocks=copies)
        self._contents = contents_of(tiers.rule, capacity)
        self._nodes = [
            _Node(Link(profile.network_bytes_per_s), Link(profile.ssd_bytes_per_s))
            for _ in range(tiers.nodes)
        ]
        self._homes: dict[int, list[int]] = {}
        """Nodes that hold each block: where it was written, and those it was copied to."""
        self._coming: dict[int, float] = {}
        """Blocks that are read ahead just now, and when they will be in DRAM."""
        self._ahead_blocks = READ_AHEAD_SHARE * PLAN_EVERY_S * profile.ssd_bytes_per_s / self._block_bytes
        self._use = TierUse()

    def used(self) -> TierUse:
        """From where KV came; at the end of a run."""
        use = self._use
        if isinstance(self._contents, Predicted):
            planner = self._contents.planner
            planner.close()
            scores = planner.scores
            use.in_time_blocks, use.late_blocks, use.wasted_blocks = (
                scores.in_time, scores.late, scores.wasted,
            )  # fmt: skip
        return use

    def look_ahead_until(self, last_s: float) -> None:
        """Look for what to read ahead and to copy, where that is wanted, until the last arrival."""
        if isinstance(self._contents, Predicted) or self._replication is not None:
            self._agenda.at(0.0, self._plan, last_s)

    def turn(self, blocks: Sequence[int], prompt_tokens: int) -> Turn:
        """A prompt came."""
        full = blocks[: prompt_tokens // BLOCK_TOKENS]
        return Turn(full, self._contents.turn(full, self._agenda.now_s))

    def cold_blocks(self, blocks: Sequence[int]) -> list[int]:
        """For each depth from 0, how many of the blocks before it lie on SSD alone."""
        counts, coming = [0], self._coming
        for block in blocks:
            counts.append(counts[-1] + (not self._warm(block) or block in coming))
        return counts

    def _warm(self, block: int) -> bool:
        """Whether it can be read from DRAM; copies are always there."""
        return self._contents.holds(block) or len(self._homes.get(block, ())) > 1

    def fetch(self, blocks: Sequence[int], first: int, end: int) -> float:
        """Blocks of a prompt leave the store for an instance.

        Args:
            blocks: of the prompt, from its start.
            first: place of the first that is wanted.
            end: place behind the last one.

        Returns:
            When the last byte has left.
        """
        now_s = ready_s = self._agenda.now_s
        if self._replication is not None:
            self._replication.read(blocks, first, end, now_s)
        sent, cold = [0] * len(self._nodes), [0] * len(self._nodes)
        for block in blocks[first:end]:
            home = self._nearest(block, sent)
            sent[home] += 1
            coming_s = self._coming.get(block)
            if coming_s is not None:
                ready_s = max(ready_s, coming_s)
                self._use.ssd_tokens += BLOCK_TOKENS
            elif self._warm(block):
                self._use.dram_tokens += BLOCK_TOKENS
            else:
                cold[home] += 1
                self._use.ssd_tokens += BLOCK_TOKENS
        for node, count, from_ssd in zip(self._nodes, sent, cold, strict=True):
            if count:
                ready_s = max(ready_s, node.nic.send(count * self._block_bytes, now_s))
            if from_ssd:
                ready_s = max(ready_s, node.ssd.send(from_ssd * self._block_bytes, now_s))
        return ready_s

    def _nearest(self, block: int, sent: Sequence[int]) -> int:
        """The node that holds a block and has it out first, after what is being sent."""
        homes = self._homes[block]
        if len(homes) == 1:
            return homes[0]
        in_dram = homes if self._contents.holds(block) else homes[1:]
        return min(in_dram, key=lambda at: self._nodes[at].nic.free_s + sent[at] * self._block_s)

    def stored(self, turn: Turn, instance: int) -> None:
        """A prompt's KV is in DRAM; an instance computed what was new of it."""
        home = instance % len(self._nodes)
        for block in turn.blocks:
            self._homes.setdefault(block, [home])
        self._contents.stored(turn.blocks, turn.session, self._agenda.now_s)

    def given_up(self, turn: Turn) -> None:
        """A prompt will not be stored any more."""
        if turn.session is not None and isinstance(self._contents, Predicted):
            self._contents.planner.given_up(turn.session)

    def dropped(self, blocks: Sequence[int]) -> None:
        """The SSD had no room left for these."""
        self._contents.dropped(blocks)
        for block in blocks:
            self._homes.pop(block, None)

    def _plan(self, last_s: float) -> None:
        now_s = self._agenda.now_s
        if isinstance(self._contents, Predicted):
            idle = sum([node.ssd.flows(now_s) == 0 for node in self._nodes])
            self._contents.keep(now_s)
            planner = self._contents.planner
            for promotion in planner.promotions(now_s, int(idle * self._ahead_blocks))[0]:
                self._read_ahead(self._contents, promotion)
        if self._replication is not None:
            self._replicate(self._replication)
        if now_s + PLAN_EVERY_S <= last_s:
            self._agenda.at(now_s + PLAN_EVERY_S, self._plan, last_s)

    def _replicate(self, replication: Replication) -> None:
        now_s, nodes = self._agenda.now_s, self._nodes
        copies, releases = replication.plan(now_s, range(len(nodes)), self._homes)
        for release in releases:
            self._use.released_blocks += len(release.keys)
            for block in release.keys:
                homes = self._homes.get(block, [])
                if release.host in homes[1:]:
                    homes.remove(int(release.host))
        for copy in copies:
            self._use.copied_blocks += len(copy.keys)
            size_bytes = len(copy.keys) * self._block_bytes
            there_s = max(nodes[int(at)].nic.send(size_bytes, now_s) for at in (copy.source, copy.target))
            self._agenda.at(there_s, self._copied, replication, copy)

    def _copied(self, replication: Replication, copy: Copy) -> None:
        if not replication.counts(copy):
            return
        for block in copy.keys:
            homes = self._homes.get(block)
            if homes is not None and copy.target not in homes:
                homes.append(int(copy.target))

    def _read_ahead(self, contents: Predicted, promotion: Promotion) -> None:
        now_s = ready_s = self._agenda.now_s
        for block in promotion.keys:
            if block not in self._homes:
                continue
            home = self._nodes[self._homes[block][0]]
            ready_s = max(ready_s, home.ssd.send(self._block_bytes, now_s))
        self._coming.update(dict.fromkeys(promotion.keys, ready_s))
        self._agenda.at(ready_s, self._there, contents, promotion)

    def _there(self, contents: Predicted, promotion: Promotion) -> None:
        for block in promotion.keys:
            self._coming.pop(block, None)
        contents.arrived(promotion, self._agenda.now_s)
