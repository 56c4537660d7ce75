"""The decode engine's side of a hand-over: pull the blocks of one request from a prefill engine."""

from __future__ import annotations

import asyncio

from mooncake_simulator.engine.connectors.base import EngineHandle
from mooncake_simulator.engine.connectors.side_channel import Channel, Done, Granted, Pull, Refused


class PullError(Exception):
    """The prefill engine refused."""


class PeerLostError(Exception):
    """The prefill engine died while it was asked."""


async def pull(engine: EngineHandle, channel: Channel, engine_id: str, transfer: str, tokens: int) -> None:
    """Ask for blocks and wait until their bytes have left the one engine and entered the other.

    Raises:
        PullError: it does not have them.
        PeerLostError: the connection broke.
    """
    try:
        await channel.send(Pull(engine_id, transfer, tokens))
        granted = await channel.receive()
        if isinstance(granted, Refused):
            raise PullError(granted.reason)
        assert isinstance(granted, Granted)
        size_bytes = granted.tokens * engine.options.profile.kv_bytes_per_token
        done, _ = await asyncio.gather(channel.receive(), engine.ingress.carry(size_bytes))
        assert isinstance(done, Done)
    except (EOFError, ConnectionError) as error:
        raise PeerLostError(str(error) or "connection closed") from error


async def let_go(host: str, port: int, engine_id: str, transfer: str) -> None:
    """Tell a prefill engine that nobody will come for these blocks.

    Raises:
        PullError: it does not have them.
        PeerLostError: the connection broke.
        OSError: nobody listens there.
    """
    channel = await Channel.connect(host, port)
    try:
        await channel.send(Pull(engine_id, transfer, 0))
        while not isinstance(answer := await channel.receive(), Done):
            if isinstance(answer, Refused):
                raise PullError(answer.reason)
    except (EOFError, ConnectionError) as error:
        raise PeerLostError(str(error) or "connection closed") from error
    finally:
        channel.close()
