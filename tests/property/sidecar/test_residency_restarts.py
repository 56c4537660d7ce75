"""Whatever dies when, the index ends up with exactly what the engine holds."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.blocks import block_keys
from mooncake_core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from mooncake_core.index import Change, MemoryIndex, Source
from mooncake_core.registry import Instance, MemoryRegistry, Role, StaleEpochError
from mooncake_sidecar.engine.residency import Residency
from mooncake_sidecar.engine.writer import IndexWriter

BLOCK = 2
PROMPTS = [[10 * p + n for n in range(8)] for p in range(4)]


class Engine:
    """A cache of prefixes that tells of every change."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.names: dict[tuple[int, int], int] = {
            (p, n): 1000 * p + n for p in range(len(PROMPTS)) for n in range(4)
        }
        self.sequence = -1

    def key(self, prompt: int, depth: int) -> int:
        return block_keys(PROMPTS[prompt], BLOCK)[depth]

    def act(self, chance: Random) -> tuple[int, bytes]:
        """Change something; returns the message."""
        prompt = chance.randrange(len(PROMPTS))
        depth = sum((prompt, n) in self._there() for n in range(4))
        event: Event
        kind = chance.random()
        if kind < 0.05:
            self.held.clear()
            event = AllBlocksCleared()
        elif depth and kind < 0.4:
            name = self.names[prompt, depth - 1]
            del self.held[name]
            event = BlockRemoved(hashes=(name,))
        elif depth < 4:
            name = self.names[prompt, depth]
            self.held[name] = self.key(prompt, depth)
            event = BlockStored(
                hashes=(name,),
                parent=self.names[prompt, depth - 1] if depth else None,
                token_ids=array("I", PROMPTS[prompt][depth * BLOCK : (depth + 1) * BLOCK]),
                block_size=BLOCK,
            )
        else:
            return self.act(chance)
        self.sequence += 1
        return self.sequence, encode_batch(EventBatch(ts=0.0, events=(event,)))

    def _there(self) -> set[tuple[int, int]]:
        return {place for place, name in self.names.items() if name in self.held}


class FailingIndex:
    """An index that is away now and then, before or after it has done what was asked."""

    def __init__(self) -> None:
        self.inner = MemoryIndex()
        self.failing: list[str] = []

    async def attach(self, source: Source) -> None:
        await self._maybe_fail(self.inner.attach(source))

    async def detach(self, source: Source) -> None:
        await self._maybe_fail(self.inner.detach(source))

    async def apply(self, source: Source, changes: list[Change], sequence: int) -> int:
        how = self.failing.pop() if self.failing else "well"
        if how == "before":
            raise ConnectionError
        applied = await self.inner.apply(source, changes, sequence)
        if how == "after":
            raise ConnectionError
        return applied

    async def _maybe_fail(self, call):
        if self.failing and self.failing[-1] == "before":
            self.failing.pop()
            call.close()
            raise ConnectionError
        return await call

    async def held(self, keys: list[int]) -> set[int]:
        matches = await self.inner.match_many([[key] for key in keys])
        return {key for key, match in zip(keys, matches, strict=True) if "a" in match}


async def flush(registry: MemoryRegistry, residency: Residency, writer: IndexWriter) -> None:
    """What the sidecar's loops do until all is written."""
    instance = Instance(id="a", role=Role.PREFILL, url="http://a", epoch=residency.epoch)
    for _ in range(50):
        try:
            if not writer.is_open:
                resume = residency.epoch if residency.continues else 0
                writer.open((await registry.register(instance, resume_epoch=resume)).epoch)
            await writer.flush()
        except (ConnectionError, StaleEpochError) as error:
            if isinstance(error, StaleEpochError):
                assert not writer.is_open
            writer.doubt()
        else:
            return
    raise AssertionError("never settles")


KINDS = ["act"] * 4 + ["flush"] * 2 + ["kill", "tear", "lose index", "replace", "fail", "lost reply"]
ACTIONS = st.lists(st.sampled_from(KINDS), min_size=1, max_size=80)


@given(actions=ACTIONS, seed=st.integers(0, 1 << 32))
@settings(max_examples=400, deadline=None)
def test_the_index_becomes_what_the_engine_holds(actions: list[str], seed: int) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(play(actions, Random(seed), Path(folder)))


async def play(actions: list[str], chance: Random, folder: Path) -> None:
    engine, registry, index = Engine(), MemoryRegistry(ttl_s=None), FailingIndex()
    messages: list[tuple[int, bytes]] = []
    residency = Residency(folder, "a", has_pool=False)
    writer = IndexWriter(index, "a", residency)
    for action in actions:
        if action == "act":
            message = engine.act(chance)
            messages.append(message)
            residency.message(*message)
        elif action == "flush":
            await flush(registry, residency, writer)
        elif action in ("kill", "tear"):
            residency.close()
            if action == "tear":
                path = folder / "a.journal"
                content = path.read_bytes()
                path.write_bytes(content[: chance.randrange(len(content) + 1)])
            residency = Residency(folder, "a", has_pool=False)
            writer = IndexWriter(index, "a", residency)
            # The engine's buffer reaches back: the tracker asks for what is missing.
            for message in messages[residency.sequence + 1 :]:
                residency.message(*message)
        elif action == "lose index":
            index.inner = MemoryIndex()
            registry = MemoryRegistry(ttl_s=None)
            writer.shut()
        elif action == "replace":
            residency.replace_journal()
        else:
            index.failing.append("before" if action == "fail" else "after")
    await flush(registry, residency, writer)
    keys = [engine.key(prompt, depth) for prompt, depth in engine.names]
    assert await index.held(keys) == set(engine.held.values())
    residency.close()
