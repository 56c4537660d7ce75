"""One incarnation's row in Redis, kept as its own table is; the scheme of the keys stands in `scripts`."""

from __future__ import annotations

import asyncio
import time

import msgspec
import structlog

from mooncake_core.ledger.board import Board
from mooncake_core.ledger.scripts import (
    BEAT,
    BEGIN,
    END,
    LEAVE,
    POST,
    RESERVE,
    SEAT,
    STALE,
    TAKEN,
)
from mooncake_core.ledger.share import Share
from mooncake_core.resp import DeadlineError, Reply, ReplyError, RespClient, Script

POST_BUDGET_S = 1.0
"""Wall seconds that the posting of a whole table may take. Requests wait for it within their own budget."""

_log = structlog.get_logger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Share]).decode


class Row:
    """The copy that Redis has of an incarnation's table, and what its peers say of theirs.

    Whatever may differ is posted again as a whole, under a new generation: what is still under way under an
    older one then does nothing. One posting at a time, and it goes on when the request that began it waits no
    longer: else each would be begun anew, and a table that takes longer than a request's budget would never
    be confirmed.

    Requests call this from coroutines that are no tasks, and that end where they wait by exceptions other
    than CancelledError (the gateway's flows): so here stands neither `asyncio.timeout` nor `asyncio.Lock`,
    whose other waiters would wait for ever after such an end.

    Args:
        client: The connection, kept by the caller.
        key: Begins every key.
        incarnation: Whose row this is.
        ttl_ms: Wall milliseconds after which peers take a silent incarnation for dead.
        board: The table, and where what peers say is written.
    """

    def __init__(self, client: RespClient, key: bytes, incarnation: str, ttl_ms: int, board: Board) -> None:
        self.posted = 0
        """How often the whole table was posted."""
        self.generation = 0
        self.closed = False
        self.heard_s = time.monotonic()
        """When the peers were last heard."""
        self._client = client
        self._key = key
        self._keys = (key,)
        self._incarnation = incarnation
        self._ttl_ms = ttl_ms
        self._board = board
        self._unsure = True
        self._posting: asyncio.Task[Exception | None] | None = None
        """Under way; its result is why it failed, if it did."""
        self._seen_errors = client.posted_errors
        self._versions: dict[str, bytes] = {}
        self._snapshot_of = -1
        self._version = 0

    @property
    def settled(self) -> bool:
        """Whether Redis holds the own table, and can be asked for more at once."""
        return self._posting is None and not self._unsure and not self.closed

    def doubt(self) -> None:
        """Redis may hold something else than the own table: it is to be posted again."""
        self._unsure = True

    def doubt_if_of(self, generation: int) -> None:
        """As `doubt`, unless the table was posted again since that generation."""
        self._unsure = self._unsure or generation == self.generation

    async def settle(self, within_s: float) -> None:
        """Post the table if Redis may hold something else, and wait until it holds it.

        Raises:
            ConnectionError: Redis is away, it took longer (and goes on), or the ledger was closed.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        while True:
            if self.closed:
                raise ConnectionError("this ledger was closed")
            if self._posting is None:
                if not self._unsure:
                    return
                self._posting = loop.create_task(self._post(), name="ledger-posting")
            failure = await _end_of(self._posting, max(0.001, ends_s - loop.time()))
            if failure is not None:
                raise failure

    async def ask(self, script: Script, *arguments: object, within_s: float) -> int:
        """Ask for something that changes the row.

        Raises:
            ConnectionError: it was not answered; it may have been carried out all the same.
        """
        try:
            reply = await self._eval(
                script, self._incarnation, self.generation, *arguments, timeout_s=within_s
            )
        except BaseException:
            # Also when the caller was cancelled.
            self._unsure = True
            raise
        return int(reply)

    def send(self, script: Script, *arguments: str | int | bytes) -> None:
        """Send a change without waiting; where that fails the whole table is posted later.

        Behind a posting that is under way, which did not know of the change. Nothing is sent while the table
        is to be posted: it will tell of the change itself.
        """
        if self._unsure or self.closed:
            return
        try:
            self._client.send_nowait(
                b"EVALSHA", script.sha, 1, self._key, self._incarnation, self.generation, *arguments
            )
        except ConnectionError:
            self._unsure = True

    async def refresh(self, now_s: float) -> None:
        """Heartbeat, and hear the peers.

        Raises:
            ConnectionError: Redis is away.
        """
        if self._client.posted_errors != self._seen_errors:
            self._seen_errors = self._client.posted_errors
            self._unsure = True
        await self.settle(POST_BUDGET_S)
        if await self._beat(now_s) == STALE:
            self._unsure = True
            await self.settle(POST_BUDGET_S)
            await self._beat(now_s)

    def forget_peers(self) -> None:
        """What they said last says nothing any more."""
        self._keep_peers([])

    async def leave(self, now_s: float) -> None:
        """Take the row away; where Redis is away, peers reap it."""
        self.closed = True
        try:
            await self._eval(LEAVE, self._incarnation, repr(now_s))
        except ConnectionError:
            return

    async def _post(self) -> Exception | None:
        """Replace what Redis holds of this incarnation by the own table; returns why it failed, if it did."""
        try:
            table = self._table()
            # Before anything is awaited: what changes from here on is sent after it, under its generation.
            self.generation += 1
            self._unsure = False
            post = b"EVAL", POST.source, 1, self._key, self._incarnation, self.generation, self._ttl_ms, table
            # `send_nowait` cannot answer "no such script", so Redis is told the scripts that it will name.
            named = [(b"SCRIPT", b"LOAD", script.source) for script in (RESERVE, BEGIN, SEAT, END)]
            await self._client.call_many([*named, post], timeout_s=POST_BUDGET_S)
        except BaseException as error:
            self._unsure = True
            if isinstance(error, ReplyError):
                return ConnectionError(f"Redis refuses the ledger's table: {error}")
            if isinstance(error, Exception):
                return error
            raise
        finally:
            self._posting = None
        self._snapshot_of = -1
        self.posted += 1
        return None

    def _table(self) -> bytes:
        """The own table as `POST` takes it."""
        prefills = []
        decodes: dict[str, list[int]] = {}
        for entry in self._board.book.entries():
            reservation = entry.reservation
            if entry.prefilling:
                prefills.append((entry.queue, repr(entry.begun_s), reservation.id, str(entry.cost_us)))
            sums = decodes.setdefault(reservation.decode, [0, 0, 0, 0])
            for at in (0, 2) if entry.decoding else (0,):
                sums[at] += 1
                sums[at + 1] += reservation.kv_tokens
        since = [(instance, repr(since_s)) for instance, since_s in self._board.since_s.items()]
        return _encode((prefills, [(instance, *sums) for instance, sums in decodes.items()], since))

    async def _beat(self, now_s: float) -> int:
        """Keep alive, publish the own shares, read those of the peers; STALE when this one was reaped."""
        changes = self._board.book.changes
        snapshot = b""
        if changes != self._snapshot_of:
            self._version += 1
            snapshot = _encode(self._board.book.shares())
        known = [part for peer, version in self._versions.items() for part in (peer, version)]
        reply = await self._eval(
            BEAT,
            self._incarnation,
            self.generation,
            self._ttl_ms,
            repr(now_s),
            self._version,
            snapshot,
            *known,
        )
        if reply == STALE:
            return STALE
        self._snapshot_of = changes
        self.heard_s = time.monotonic()
        since, peers = reply
        self._board.since_s = {
            instance.decode(): float(since_s)
            for instance, since_s in zip(since[0::2], since[1::2], strict=True)
        }
        self._keep_peers([peer.decode() for peer in peers[0::3]])
        for peer, version, shares in zip(peers[0::3], peers[1::3], peers[2::3], strict=True):
            if shares:
                self._versions[peer.decode()] = version
                self._board.hear(peer.decode(), _read(peer, shares))
        return TAKEN

    def _keep_peers(self, present: list[str]) -> None:
        self._board.keep_peers(present)
        self._versions = {peer: version for peer, version in self._versions.items() if peer in present}

    async def _eval(self, script: Script, *args: object, timeout_s: float | None = None) -> Reply:
        try:
            return await self._client.eval(script, self._keys, args, timeout_s=timeout_s)  # type: ignore[arg-type]
        except ReplyError as error:
            raise ConnectionError(f"Redis refuses the ledger: {error}") from error


def _read(peer: bytes, shares: bytes) -> dict[str, Share]:
    """What a peer promised; nothing where it is of a version that says it in other words."""
    try:
        return _decode(shares)
    except msgspec.DecodeError as error:
        _log.warning("what a scheduler says of its work cannot be read", peer=peer.decode(), error=str(error))
        return {}


async def _end_of(posting: asyncio.Task[Exception | None], within_s: float) -> Exception | None:
    """Wait for the end of a posting that others wait for too; why it failed.

    Raises:
        DeadlineError: it took longer.
    """
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def end(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    posting.add_done_callback(end)
    timer = loop.call_later(within_s, end)
    try:
        await waiter
    finally:
        timer.cancel()
        posting.remove_done_callback(end)
    if not posting.done():
        raise DeadlineError("Redis did not take the ledger's table within the time of the call")
    return posting.result()
