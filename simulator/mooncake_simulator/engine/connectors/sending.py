"""The prefill engine's side of a hand-over: blocks that wait for a decode engine to pull them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from mooncake_simulator.engine.connectors.base import EngineHandle
from mooncake_simulator.engine.connectors.side_channel import Channel, Done, Granted, Pull, Refused, Touch

LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Staged:
    sequence_id: str
    tokens: int
    expiry: asyncio.TimerHandle
    flowing: bool = False


@dataclass(slots=True)
class Staging:
    """Blocks by transfer name, kept until they were pulled or `keep_wall_s` passed."""

    engine: EngineHandle
    engine_id: str
    keep_wall_s: float
    waits_for_unknown: bool
    """Whether a pull may come before the prefill has ended (Mooncake), or is refused then (NIXL)."""
    on_expiry: Callable[[], None] = lambda: None
    _staged: dict[str, _Staged] = field(default_factory=dict)
    _arrivals: dict[str, asyncio.Event] = field(default_factory=dict)

    def stage(self, transfer: str, sequence_id: str, tokens: int) -> None:
        """Keep the blocks of an ended prefill; for those of an earlier one of that name nobody can ask."""
        earlier = self._staged.get(transfer)
        if earlier is not None and not earlier.flowing:
            earlier.expiry.cancel()
            self.engine.release_held(earlier.sequence_id)
        expiry = asyncio.get_running_loop().call_later(self.keep_wall_s, self._expire, transfer)
        self._staged[transfer] = _Staged(sequence_id, tokens, expiry)
        arrival = self._arrivals.pop(transfer, None)
        if arrival is not None:
            arrival.set()

    async def serve(self, channel: Channel) -> None:
        """Answer one decode engine.

        Raises:
            EOFError, ConnectionError: it is gone.
        """
        while True:
            message = await channel.receive()
            if isinstance(message, Touch):
                self._touch(message.transfer)
            elif isinstance(message, Pull):
                await self._give(channel, message)

    async def _give(self, channel: Channel, pull: Pull) -> None:
        if pull.engine_id != self.engine_id:
            await channel.send(Refused(f"this engine is {self.engine_id}, not {pull.engine_id}"))
            return
        staged = await self._find(pull.transfer)
        if staged is None or staged.flowing:
            await channel.send(Refused(f"no blocks are kept for {pull.transfer}"))
            return
        staged.flowing = True
        staged.expiry.cancel()
        try:
            tokens = min(pull.tokens, staged.tokens)
            await channel.send(Granted(tokens))
            await self.engine.egress.carry(tokens * self.engine.options.profile.kv_bytes_per_token)
            await channel.send(Done())
        finally:
            # Pulled, or the puller died on the way: nobody else will come for them.
            if self._staged.get(pull.transfer) is staged:
                del self._staged[pull.transfer]
            self.engine.release_held(staged.sequence_id)

    async def _find(self, transfer: str) -> _Staged | None:
        if transfer not in self._staged and self.waits_for_unknown:
            arrival = self._arrivals.setdefault(transfer, asyncio.Event())
            try:
                async with asyncio.timeout(self.keep_wall_s):
                    await arrival.wait()
            except TimeoutError:
                self._arrivals.pop(transfer, None)
        return self._staged.get(transfer)

    def _touch(self, transfer: str) -> None:
        staged = self._staged.get(transfer)
        if staged is not None and not staged.flowing:
            staged.expiry.cancel()
            staged.expiry = asyncio.get_running_loop().call_later(self.keep_wall_s, self._expire, transfer)

    def _expire(self, transfer: str) -> None:
        staged = self._staged.pop(transfer)
        self.on_expiry()
        LOG.warning("%s: nobody came for its KV within %g s", transfer, self.keep_wall_s)
        self.engine.release_held(staged.sequence_id)
