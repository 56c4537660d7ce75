"""The engine's cache as the sidecar knows it: journalled first, then waiting to be written into the index."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import structlog

from mooncake_core.events import BlockHash, EventDecodeError, decode_batch
from mooncake_core.events.sequence import NOTHING, fingerprint
from mooncake_core.index import Change, Tier
from mooncake_sidecar.engine.journal import Checked, Entry, Everything, Forgotten, Journal, Message, Opened
from mooncake_sidecar.engine.mirror import Drop, Mirror, Put, Shared, Step

_log = structlog.get_logger(__name__)

REPLACE_ABOVE_BYTES = 4 << 20
"""A journal smaller than this is not worth replacing."""
_REPLACE_GROWTH = 4
JOURNAL_MOST_BYTES = 256 << 20
"""A journal that grew so far because the index takes nothing is replaced; the index is written anew."""
REPAIR_EVERY_S = 10.0
"""Wall seconds between attempts to write a broken journal anew: on a full disk each costs an image of all."""
WAITING_MOST_KEYS = 1_000_000
"""Beyond, changes that wait for the index are dropped; everything is written again instead."""


class Residency:
    """Mirror, journal, and the changes that the index has not got yet.

    Args:
        folder: where the journal lies; what an earlier life of the sidecar left there is taken over.
        instance: whose cache it is.
        has_pool: whether blocks below HBM lie in a shared pool.
    """

    def __init__(self, folder: Path, instance: str, *, has_pool: bool) -> None:
        self.epoch = 0
        """The epoch under which the index was last written; 0 = none."""
        self.continues = False
        """Whether what the index holds under `epoch` can be carried on. False: a new epoch is needed."""
        self.sequence = NOTHING
        """The engine's last message."""
        self.fingerprint: int | None = None
        self.version = 0
        """Grows with every message that changes something for the index."""
        self.undecodable = 0
        self.journal_errors = 0
        self.begun: tuple[int, ...] = ()
        """Keys of the last prompt that the engine computed from its very beginning."""
        self.mirror = Mirror(has_pool=has_pool)
        self._waiting: deque[tuple[int, list[Change]]] = deque()
        self._waiting_keys = 0
        self._unwritten: list[Shared] = []
        self._journal = Journal(folder, instance)
        self._journal_broken = False
        self._repair_at_s = 0.0
        self._image_bytes = 0
        self._load()

    @property
    def waiting_keys(self) -> int:
        """Keys of changes that the index has not got."""
        return self._waiting_keys

    def message(self, sequence: int, payload: bytes) -> None:
        """Carry out the engine's next message."""
        steps: list[Step] = []
        own: list[Change] = []
        cleared = False
        try:
            events = decode_batch(payload).events
        except EventDecodeError as error:
            self.undecodable += 1
            _log.error("an event batch cannot be read", sequence=sequence, error=str(error))
            events = ()
        for event in events:
            step = self.mirror.read(event)
            if step is None:
                continue
            steps.append(step)
            if isinstance(step, Put) and step.depth == 0 and step.tier == Tier.HBM:
                self.begun = step.keys
            effect = self.mirror.carry_out(step)
            own += effect.own
            self._unwritten += effect.shared
            if not isinstance(step, Put | Drop):
                cleared = True
                own.clear()
        self.sequence, self.fingerprint = sequence, fingerprint(payload)
        if own:
            self.version += 1
            self._wait(self.version, own)
        self._write(Message(sequence, self.fingerprint, self.version, tuple(steps)))
        if cleared:
            # A new epoch forgets everything at once, thousands of removals would take their time.
            self._start_over()

    def forget(self) -> None:
        """The engine began a new life, or what it said cannot be trusted to be complete."""
        self.mirror.clear()
        self.sequence, self.fingerprint = NOTHING, None
        self._write(Forgotten())
        self._start_over()

    def begin_epoch(self, epoch: int) -> None:
        """The registry gave an epoch; if it is a new one, nothing of it is in the index yet."""
        if epoch != self.epoch:
            self.continues = False
            self.epoch = epoch
            self._write(Opened(epoch))

    def everything(self) -> tuple[list[Change], int]:
        """All that the engine holds, and the version that this is; for an epoch with nothing in it."""
        self._waiting.clear()
        self._waiting_keys = 0
        return self.mirror.own(), self.version

    def waiting(self) -> tuple[list[Change], int] | None:
        """The changes that the index has not got, and the version they lead to; None = it has all."""
        if not self._waiting:
            return None
        return [change for _, changes in self._waiting for change in changes], self._waiting[-1][0]

    def acknowledge(self, version: int) -> None:
        """The index has got everything up to a version."""
        self.continues = True
        while self._waiting and self._waiting[0][0] <= version:
            _, changes = self._waiting.popleft()
            self._waiting_keys -= sum(len(change.keys) for change in changes)
        if not self._waiting and self._journal.bytes > max(
            REPLACE_ABOVE_BYTES, _REPLACE_GROWTH * self._image_bytes
        ):
            self.replace_journal()

    def carries_on_from(self, version: int) -> bool:
        """Whether what waits, carried out on an index at `version`, makes it complete."""
        if version > self.version:
            return False
        first_waiting = self._waiting[0][0] if self._waiting else self.version + 1
        return version >= first_waiting - 1

    def lose_index(self) -> None:
        """What the index holds cannot be carried on: it will be written anew under a new epoch."""
        self._start_over()

    def take_shared(self) -> list[Shared]:
        """Blocks that came into the pool since this was last asked."""
        taken, self._unwritten = self._unwritten, []
        return taken

    def pool_lost(self, hashes: Sequence[BlockHash], tier: Tier) -> None:
        """The store's master knows these blocks no more in this tier."""
        step = Drop(int(tier), True, tuple(hashes))
        self.mirror.carry_out(step)
        self._write(Checked((step,)))

    def pool_moved(self, block_hash: BlockHash, to: Tier) -> None:
        """The store's master has this block in another tier than was told."""
        block = self.mirror.get(block_hash)
        if block is None:
            return
        put = Put(int(to), True, block.seed, block.depth, (block_hash,), (block.key,))
        drop = Drop(int(Tier.DRAM | Tier.SSD) & ~int(to), True, (block_hash,))
        for step in (put, drop):
            self.mirror.carry_out(step)
        self._write(Checked((put, drop)))

    def replace_journal(self) -> None:
        """Write the journal anew, without its past."""
        try:
            self._journal.replace(
                Everything(
                    self.epoch,
                    self.continues,
                    self.sequence,
                    self.fingerprint,
                    self.version,
                    self.mirror.image(),
                )
            )
        except OSError as error:
            self._journal_failed(error)
            return
        self._journal_broken = False
        self._image_bytes = self._journal.bytes

    def close(self) -> None:
        """Close the journal; it stays for the next life."""
        self._journal.close()

    def _start_over(self) -> None:
        self.continues = False
        self._waiting.clear()
        self._waiting_keys = 0

    def _wait(self, version: int, changes: list[Change]) -> None:
        self._waiting.append((version, changes))
        self._waiting_keys += sum(len(change.keys) for change in changes)
        if self._waiting_keys > WAITING_MOST_KEYS:
            self._start_over()

    def _write(self, entry: Opened | Message | Checked | Forgotten) -> None:
        if self._journal_broken:
            if time.monotonic() >= self._repair_at_s:
                self.replace_journal()
            return
        try:
            self._journal.append(entry)
        except OSError as error:
            self._journal_failed(error)
            return
        if self._journal.bytes > max(JOURNAL_MOST_BYTES, _REPLACE_GROWTH * self._image_bytes):
            self._start_over()
            self.replace_journal()

    def _journal_failed(self, error: OSError) -> None:
        self.journal_errors += 1
        self._journal_broken = True
        self._repair_at_s = time.monotonic() + REPAIR_EVERY_S
        _log.error("the journal cannot be written: a restart will begin with nothing", error=str(error))

    def _load(self) -> None:
        entries = 0
        try:
            for entry in self._journal.load():
                entries += 1
                self._load_entry(entry)
        except OSError as error:
            self._journal_failed(error)
        self._waiting_keys = sum(len(change.keys) for _, changes in self._waiting for change in changes)
        self._unwritten = list(self.mirror.shared())
        if entries:
            _log.info(
                "journal loaded",
                entries=entries,
                blocks=len(self.mirror),
                sequence=self.sequence,
                epoch=self.epoch,
                cut_bytes=self._journal.cut_bytes,
            )

    def _load_entry(self, entry: Entry) -> None:
        if isinstance(entry, Everything):
            self.mirror.restore(entry.image)
            self.epoch, self.sequence, self.fingerprint, self.version = (
                entry.epoch,
                entry.sequence,
                entry.fingerprint,
                entry.version,
            )
            self.continues = entry.continues
            self._image_bytes = self._journal.bytes
        elif isinstance(entry, Opened):
            self.epoch = entry.epoch
            self.continues = True
            self._waiting.clear()
        elif isinstance(entry, Forgotten):
            self.mirror.clear()
            self.sequence, self.fingerprint = NOTHING, None
            self._start_over()
        else:
            self._load_steps(entry)

    def _load_steps(self, entry: Message | Checked) -> None:
        own: list[Change] = []
        for step in entry.steps:
            own += self.mirror.carry_out(step).own
            if not isinstance(step, Put | Drop):
                own.clear()
                self._start_over()
        if isinstance(entry, Message):
            self.sequence, self.fingerprint = entry.sequence, entry.fingerprint
            if entry.version > self.version and own:
                self._waiting.append((entry.version, own))
            self.version = entry.version
