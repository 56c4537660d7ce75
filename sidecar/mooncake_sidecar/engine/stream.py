"""The engine's KV events over ZMQ, in order and each once: subscription, gaps, replay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mooncake_core.events import Apply, AskReplay, Effect, EventDecodeError, ResyncReason, SequenceTracker
from mooncake_core.events.framing import parse_publication, parse_replay_answer, replay_request

_log = structlog.get_logger(__name__)

REPLAY_TIMEOUT_S = 5.0
"""Wall seconds between two answers of a replay."""
QUIET_CHECK_S = 10.0
"""Wall seconds without a message after which it is checked that none was lost."""


class EventStream:
    """Reads one engine's events until cancelled.

    Args:
        endpoint: where the engine publishes.
        replay_endpoint: where it answers replays; None = it does not.
        tracker: knows what came before.
        on_message: called with sequence and payload of every message, in order.
        on_resync: called when all that came before counts no more.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        tracker: SequenceTracker,
        on_message: Callable[[int, bytes], None],
        on_resync: Callable[[ResyncReason], None],
    ) -> None:
        self.endpoint = endpoint
        self.messages = 0
        """Carried out by this stream."""
        self.gaps = 0
        """Replays that were asked for."""
        self.malformed = 0
        self.caught_up = asyncio.Event()
        """Set when all that the engine had to say at the start was heard: what is known is true."""
        self._replay_endpoint = replay_endpoint
        self._tracker = tracker
        self._on_message = on_message
        self._on_resync = on_resync
        self._context = zmq.asyncio.Context()
        self._replay: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()

    async def run(self) -> None:
        """Subscribe and read."""
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, 0)
        subscriber.setsockopt(zmq.RECONNECT_IVL, 50)
        subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        subscriber.subscribe(b"")
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        watching = asyncio.create_task(self._watch(monitor), name="events-monitor")
        checking = asyncio.create_task(self._check_when_quiet(), name="events-check")
        try:
            subscriber.connect(self.endpoint)
            while True:
                await self._read(subscriber)
        finally:
            helping = [task for task in (watching, checking, self._replay) if task is not None]
            for task in helping:
                task.cancel()
            try:
                await asyncio.gather(*helping, return_exceptions=True)
            finally:
                subscriber.disable_monitor()
                # Closes the sockets too: `term` would wait for ever for one that is left, the loop with it.
                self._context.destroy(linger=0)

    async def _read(self, subscriber: zmq.asyncio.Socket) -> None:
        frames = await subscriber.recv_multipart()
        self._heard_at = time.monotonic()
        try:
            message = parse_publication(frames)
        except EventDecodeError as error:
            self.malformed += 1
            _log.error("what is published is no KV event", endpoint=self.endpoint, error=str(error))
            return
        self._carry_out(self._tracker.live(message.sequence, message.payload))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Tell the tracker of every connection: it may be that of a new life."""
        while True:
            await recv_monitor_message(monitor)
            _log.debug("connected to the engine's events", endpoint=self.endpoint)
            self._heard_at = time.monotonic()
            self._carry_out(self._tracker.connected())
            if self._replay_endpoint is None:
                self.caught_up.set()

    async def _check_when_quiet(self) -> None:
        while True:
            await asyncio.sleep(QUIET_CHECK_S / 4)
            if time.monotonic() - self._heard_at > QUIET_CHECK_S:
                self._heard_at = time.monotonic()
                self._carry_out(self._tracker.check())

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self.messages += 1
                self._on_message(effect.sequence, effect.payload)
            elif isinstance(effect, AskReplay):
                self.gaps += 1
                if self._replay is not None:
                    self._replay.cancel()
                self._replay = asyncio.create_task(
                    self._ask(effect.first, effect.attempt), name=f"events-replay-{effect.attempt}"
                )
            else:
                _log.warning(
                    "what was known of the engine's cache counts no more", reason=effect.reason.value
                )
                self._on_resync(effect.reason)

    async def _ask(self, first: int, attempt: int) -> None:
        assert self._replay_endpoint is not None, "the tracker was told that there is no replay"
        # A socket of its own: late answers of an abandoned attempt end with it.
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart(replay_request(first))
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    answer = parse_replay_answer(await dealer.recv_multipart())
                if answer is None:
                    break
                self._carry_out(self._tracker.replayed(attempt, answer.sequence, answer.payload))
        except (TimeoutError, EventDecodeError, zmq.ZMQError) as error:
            _log.warning("the replay of events failed", endpoint=self._replay_endpoint, error=repr(error))
            self._end(self._tracker.replay_failed(attempt))
        else:
            self._end(self._tracker.replay_ended(attempt))
        finally:
            dealer.close(linger=0)

    def _end(self, effects: list[Effect]) -> None:
        self._carry_out(effects)
        if not self._tracker.replaying:
            self.caught_up.set()
