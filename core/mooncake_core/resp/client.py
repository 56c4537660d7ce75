"""The client: one connection kept alive, shared by all tasks of a process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from mooncake_core.resp.address import Address
from mooncake_core.resp.connection import Argument, Connection, Reply
from mooncake_core.resp.errors import ReplyError
from mooncake_core.resp.script import Script

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MOST_S = 2.0


class RespClient:
    """A Redis client over one pipelined connection.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://…` for TLS, `unix:///path[?db=n]`.
        password: instead of the one in the URL; a callable is asked at every connect, so that a rotated
            Secret is picked up.
        timeout_s: wall seconds that a call may take when it does not say so itself.
        connect_timeout_s: wall seconds for connecting and the handshake.
        stall_s: when the oldest call is so long past its deadline, the connection is given up.
        on_new_server: called with the new run id when a reconnect finds another Redis process: what was in
            memory is gone, scripts included.
    """

    def __init__(
        self,
        url: str,
        password: str | Callable[[], str | None] | None = None,
        *,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 2.0,
        stall_s: float = 2.0,
        on_new_server: Callable[[str], None] | None = None,
    ) -> None:
        self.address = Address.parse(url)
        self.on_new_server = on_new_server
        self.on_connected: Callable[[], None] | None = None
        """Called after every successful handshake, the first one included."""
        self.run_id: str | None = None
        """Of the Redis process last spoken to."""
        self.posted_errors = 0
        """Error replies to `send_nowait`, which nobody waits for."""
        self._password = password
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._stall_s = stall_s
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._attempted: asyncio.Future[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether a call would be sent now."""
        return self._connection is not None and self._connection.is_open

    async def connect(self) -> None:
        """Connect, and keep connected until `close`.

        Raises:
            ConnectionError: the first attempt failed. The client goes on trying in the background all the
                same: a caller that can do without Redis for now may go on.
        """
        if self._keeper is None:
            self._attempted = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep_connected(self._attempted), name="resp-keeper")
        if self._attempted is not None:
            await asyncio.shield(self._attempted)

    async def close(self) -> None:
        """Drop the connection. Calls in flight fail with ConnectionError."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        closed = ConnectionError("the client was closed")
        if self._attempted is not None and not self._attempted.done():
            self._attempted.set_exception(closed)
            self._attempted.exception()  # retrieved here, should nobody wait
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort(closed)
            await asyncio.sleep(0)

    async def call(self, *args: Argument, timeout_s: float | None = None) -> Reply:
        """Carry out one command.

        Raises:
            ReplyError: Redis answered with an error.
            DeadlineError: (a ConnectionError) no answer in time; the command may have been carried out.
            ConnectionError: not connected, or the connection broke.
        """
        return await self._live().request_one(args, timeout_s or self._timeout_s)

    async def call_many(
        self, commands: Sequence[Sequence[Argument]], *, timeout_s: float | None = None
    ) -> list[Reply]:
        """Carry out commands in one write, not atomically; replies in order, the first error is raised."""
        if not commands:
            return []
        replies: list[Reply] = await self._live().request(commands, timeout_s or self._timeout_s)
        return replies

    def send_nowait(self, *args: Argument) -> None:
        """Send a command and forget it: its reply is dropped, an error only counted (`posted_errors`).

        It leaves with the next call, or by itself within a few milliseconds (`POSTED_WITHIN_S`).

        Raises:
            ConnectionError: not connected; nothing was sent.
        """
        self._live().post(args, self._timeout_s)

    async def eval(
        self,
        script: Script,
        keys: Sequence[Argument],
        args: Sequence[Argument],
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Run a script by its digest; where Redis does not know it (new process, flush), with its source.

        Raises: as `call`.
        """
        try:
            return await self._live().request_one(
                (b"EVALSHA", script.sha, len(keys), *keys, *args), timeout_s or self._timeout_s
            )
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
        return await self.call(b"EVAL", script.source, len(keys), *keys, *args, timeout_s=timeout_s)

    def _live(self) -> Connection:
        if self._connection is None or not self._connection.is_open:
            raise ConnectionError(f"not connected to Redis at {self.address}")
        return self._connection

    async def _keep_connected(self, attempted: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        backoff_s = 0.0
        while True:
            try:
                connection = await self._open()
            except Exception as error:
                if not attempted.done():
                    attempted.set_exception(_as_connection_error(error, self.address))
                    attempted.exception()  # retrieved here, should nobody wait any more
            else:
                if not attempted.done():
                    attempted.set_result(None)
                opened_s = loop.time()
                await connection.lost
                # One that breaks when it is used (a replica, a proxy without its server) is as good as none.
                if loop.time() - opened_s > _BACKOFF_MOST_S:
                    backoff_s = 0.0
                    continue
            backoff_s = min(max(backoff_s * 2, _BACKOFF_FIRST_S), _BACKOFF_MOST_S)
            # Many clients lose one Redis in the same instant: they must not come back in one.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, stall_s=self._stall_s, on_error=self._count_posted_error)
        address = self.address
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                if address.path:
                    await loop.create_unix_connection(lambda: connection, address.path)
                else:
                    await loop.create_connection(
                        lambda: connection, address.host, address.port, ssl=address.tls or None
                    )
                run_id = await self._greet(connection)
        except BaseException as error:
            connection.abort(ConnectionError(str(error)))
            raise
        previous, self.run_id = self.run_id, run_id
        self._connection = connection
        if self.on_connected is not None:
            self.on_connected()
        if previous is not None and previous != run_id and self.on_new_server is not None:
            self.on_new_server(run_id)
        return connection

    async def _greet(self, connection: Connection) -> str:
        """AUTH, SELECT and ask for the run id."""

        async def call(*args: Argument) -> Reply:
            return await connection.request_one(args, self._connect_timeout_s)

        password = self._password() if callable(self._password) else self._password
        password = password or self.address.password
        if password:
            user = (self.address.username,) if self.address.username else ()
            await call("AUTH", *user, password)
        if self.address.db:
            await call("SELECT", self.address.db)
        info: bytes = await call("INFO", "server")
        for line in info.splitlines():
            if line.startswith(b"run_id:"):
                return line.partition(b":")[2].decode()
        raise ConnectionError(
            "INFO server names no run_id: a proxy that hides the server cannot be used here"
        )

    def _count_posted_error(self, _error: ReplyError) -> None:
        self.posted_errors += 1


def _as_connection_error(error: Exception, address: Address) -> ConnectionError:
    if isinstance(error, ReplyError):
        hint = "; check the Redis password" if error.code in {"NOAUTH", "WRONGPASS", "ERR"} else ""
        return ConnectionError(f"Redis at {address} refused the handshake: {error}{hint}")
    if isinstance(error, TimeoutError):
        return ConnectionError(f"Redis at {address} did not answer in time")
    return ConnectionError(f"cannot connect to Redis at {address}: {error}")
