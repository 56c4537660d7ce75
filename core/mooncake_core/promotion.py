"""What schedulers and sidecars tell each other about a store's tiers, so that blocks are in DRAM in time.

A turn of a conversation begins with all that was said before. Where that lies on SSD it is brought to DRAM
before the turn comes (ADR 39). Three parties, three streams in Redis:

- every scheduler tells which prompts came and what became of them (`came`, `ended`),
- one of them at a time plans, and says which blocks are wanted in DRAM (`want`),
- the sidecars that know these blocks by the store's names bring them, and tell what they found (`report`).

Streams are bounded and nobody waits for them: what is lost here costs a request some time, nothing else. All
times are those of Redis' clock, so that those of different processes can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from mooncake_core.blocks import pack_keys, unpack_keys
from mooncake_core.resp import RespClient, Script

MOST_TURNS: Final = 1_000
"""Of the last prompts, as a planner finds them that takes over; at 8 bytes a block."""
_MOST_WISHES: Final = 200
WISHES_LAST_S: Final = 30.0
"""Older wishes are of no use to anybody, and those of what shall stay are large."""
_LEADING: Final = Script("""
local now = redis.call('GET', KEYS[1])
if now and now ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""")
_LEAVING: Final = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""")


class Came(NamedTuple):
    """A prompt was placed."""

    at_s: float
    request: str
    tenant: str
    keys: Sequence[int]
    """Block keys of its full blocks, from the start; as all that is read here an `array('Q')` and no ints: a
    long prompt has thousands, and there are thousands of prompts."""


class Ended(NamedTuple):
    """A request has ended."""

    at_s: float
    request: str
    stored: bool
    """Whether its prompt was computed, so that the store has it."""


class Wanted(NamedTuple):
    """Blocks that shall lie in DRAM."""

    number: int
    """Of the wish, for the answers; 0 = they are there, and stay when they are looked up: none is wanted."""
    keys: Sequence[int]


class Found(NamedTuple):
    """What a sidecar has found and brought of a wish: block keys."""

    at_s: float
    number: int
    brought: Sequence[int]
    """They lay on SSD, and lie in DRAM now."""
    there: Sequence[int]
    """They lay in DRAM already."""
    gone: Sequence[int]
    """The store has them no more."""


Turn: TypeAlias = Came | Ended


class Cursor:
    """How far one reader is in one stream.

    Args:
        after: the last entry that it has, `0` = none; `$` is not among them, see `PromotionStreams.newest`.
    """

    __slots__ = ("after", "server")

    def __init__(self, after: str = "0") -> None:
        self.after = after
        self.server: str | None = None
        """Redis process that was read from last."""

    @property
    def order(self) -> tuple[int, ...]:
        """By which cursors compare."""
        return tuple(int(part) for part in self.after.split("-"))


class PromotionStreams:
    """The three streams of one cluster.

    Args:
        client: a client of the shared Redis; stays the caller's.
        namespace: prefix of the keys.
    """

    def __init__(self, client: RespClient, namespace: str) -> None:
        root = f"mc:{{{namespace}}}:promotion:"
        self.turns, self.wishes, self.findings = f"{root}turns", f"{root}wishes", f"{root}findings"
        self._planner = f"{root}planner"
        self._client = client

    def came(self, request: str, tenant: str, keys: Sequence[int]) -> None:
        """Tell of a prompt; nobody waits for it.

        Raises:
            ConnectionError: Redis is away, nothing was told.
        """
        self._tell("r", request, "t", tenant, "k", pack_keys(keys))

    def ended(self, request: str, *, stored: bool) -> None:
        """Tell of its end, likewise.

        Raises:
            ConnectionError: Redis is away, nothing was told.
        """
        self._tell("r", request, "s", int(stored))

    async def lead(self, who: str, ttl_s: float) -> bool:
        """Be the one who plans, or stay it, for so many seconds; False while another one is.

        Raises:
            ConnectionError: Redis is away.
        """
        return bool(await self._client.eval(_LEADING, [self._planner], [who, int(ttl_s * 1000)]))

    async def leave(self, who: str) -> None:
        """Plan no more: the next one need not wait until the lead ends by itself.

        Raises:
            ConnectionError: Redis is away.
        """
        await self._client.eval(_LEAVING, [self._planner], [who])

    async def now_s(self) -> float:
        """The time by Redis' clock.

        Raises:
            ConnectionError: Redis is away.
        """
        seconds, micros = await self._client.call("TIME")
        return int(seconds) + int(micros) / 1e6

    async def read_turns(self, cursor: Cursor, most: int) -> list[Turn]:
        """The next turns, in order; the cursor moves on.

        Raises:
            ConnectionError: Redis is away.
        """
        turns: list[Turn] = []
        for at_s, fields in await self._read(self.turns, cursor, most):
            request = fields[b"r"].decode()
            if b"k" in fields:
                turns.append(Came(at_s, request, fields[b"t"].decode(), unpack_keys(fields[b"k"])))
            else:
                turns.append(Ended(at_s, request, fields[b"s"] == b"1"))
        return turns

    async def want(self, wishes: Iterable[Wanted]) -> None:
        """Say what shall be brought.

        Raises:
            ConnectionError: Redis is away.
        """
        bounded = ("XADD", self.wishes, "MAXLEN", "~", _MOST_WISHES, "*")
        commands = [(*bounded, "n", each.number, "k", pack_keys(each.keys)) for each in wishes]
        told = await self._client.call_many(commands)
        if told:
            newest_ms = int(told[-1].partition(b"-")[0])
            oldest_ms = max(0, newest_ms - int(WISHES_LAST_S * 1000))
            self._client.send_nowait("XTRIM", self.wishes, "MINID", "~", oldest_ms)

    async def read_wishes(self, cursor: Cursor, most: int) -> list[Wanted]:
        """The next wishes; the cursor moves on.

        Raises:
            ConnectionError: Redis is away.
        """
        read = await self._read(self.wishes, cursor, most)
        return [Wanted(int(fields[b"n"]), unpack_keys(fields[b"k"])) for _, fields in read]

    async def report(self, found: Found) -> None:
        """Tell what was found and brought; its time is set by Redis.

        Raises:
            ConnectionError: Redis is away.
        """
        packed = ("b", pack_keys(found.brought), "h", pack_keys(found.there), "g", pack_keys(found.gone))
        bounded = ("XADD", self.findings, "MAXLEN", "~", _MOST_WISHES, "*")
        await self._client.call(*bounded, "n", found.number, *packed)

    async def read_findings(self, cursor: Cursor, most: int) -> list[Found]:
        """The next findings; the cursor moves on.

        Raises:
            ConnectionError: Redis is away.
        """
        return [
            Found(at_s, int(fields[b"n"]), *(unpack_keys(fields[name]) for name in (b"b", b"h", b"g")))
            for at_s, fields in await self._read(self.findings, cursor, most)
        ]

    async def newest(self, stream: str) -> Cursor:
        """A cursor behind all that is in a stream now.

        Raises:
            ConnectionError: Redis is away.
        """
        last = await self._client.call("XREVRANGE", stream, "+", "-", "COUNT", 1)
        return Cursor(last[0][0].decode() if last else "0")

    def _tell(self, *fields: Any) -> None:
        # Each prompt is told of twice.
        self._client.send_nowait("XADD", self.turns, "MAXLEN", "~", 2 * MOST_TURNS, "*", *fields)

    async def _read(self, stream: str, cursor: Cursor, most: int) -> list[tuple[float, dict[bytes, bytes]]]:
        if cursor.server != self._client.run_id:
            # Entries are numbered by Redis' clock, and that of the next one may be behind.
            if cursor.server is not None and (newest := await self.newest(stream)).order < cursor.order:
                cursor.after = newest.after
            cursor.server = self._client.run_id
        entries = await self._client.call("XRANGE", stream, f"({cursor.after}", "+", "COUNT", most)
        read = []
        for name, fields in entries:
            cursor.after = name.decode()
            at_ms = int(cursor.after.partition("-")[0])
            read.append((at_ms / 1e3, dict(zip(fields[::2], fields[1::2], strict=True))))
        return read
