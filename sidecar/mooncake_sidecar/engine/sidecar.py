"""One engine's sidecar: keeps the registry, the index and the pool in agreement with the engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from mooncake_core.config import SidecarConfig
from mooncake_core.events import ResyncReason, SequenceTracker
from mooncake_core.index import RedisIndex, SlotsExhaustedError
from mooncake_core.promotion import PromotionStreams
from mooncake_core.registry import EngineReport, Instance, InstanceState, StaleEpochError
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import ReplyError, RespClient
from mooncake_sidecar.engine.alarms import Alarms
from mooncake_sidecar.engine.engine_probe import EngineProbe, Facts, Health, Load
from mooncake_sidecar.engine.findable import Findable
from mooncake_sidecar.engine.pool import CHECK_EVERY_S, Pool, pool_record
from mooncake_sidecar.engine.prefetch import Prefetcher
from mooncake_sidecar.engine.record import event_source, instance_record
from mooncake_sidecar.engine.residency import Residency
from mooncake_sidecar.engine.stream import EventStream
from mooncake_sidecar.engine.writer import IndexWriter

_log = structlog.get_logger(__name__)

FLUSH_EVERY_S = 0.05
"""Changes are written together: a Redis call each would cost more than the delay."""
ILL_MOST = 3
"""Bad answers of `/health` in a row after which the engine gets no more work."""
CATCH_UP_S = 15.0
"""An engine that is well but whose events cannot be had is registered after so long."""


_AWAY = (ConnectionError, ReplyError, SlotsExhaustedError)
"""Why shared state cannot be written now; it is tried again."""


class Sidecar:
    """Runs beside one engine.

    Args:
        config: all that it is told.

    Raises:
        OSError: the journal's folder cannot be written.
        ValueError: the Redis URL is none.
    """

    def __init__(self, config: SidecarConfig) -> None:
        self.config = config
        self.residency = Residency(Path(config.journal_dir), config.instance, has_pool=bool(config.store))
        self.client = RespClient(config.redis_url, self._password, on_new_server=self._new_server)
        self.client.on_connected = self._connected
        self.index = RedisIndex(self.client, namespace=config.namespace)
        self.registry = RedisRegistry(config.redis_url, namespace=config.namespace, password=self._password)
        self.writer = IndexWriter(self.index, config.instance, self.residency)
        self.findable = Findable(self.index, config.store if config.fetch == "store" else "", self.residency)
        self.probe = EngineProbe(config.engine_url)
        self.pool: Pool | None = None
        self.prefetcher: Prefetcher | None = None
        self.instance: Instance | None = None
        """As registered; None = it is not."""
        self.load: Load | None = None
        self.alarms: Alarms | None = None
        self.stream: EventStream | None = None
        self.shared_state_away = False
        self.draining = False
        self.beaten_at = time.monotonic()
        """When the engine was last looked at."""
        self._facts: Facts | None = None
        self._streaming: asyncio.Task[None] | None = None
        self._streaming_since = 0.0
        self._ill = 0
        self._dead = False
        self._was_gone = False
        """Others saw nobody listen, maybe between two beats."""
        self._began_s = 0.0
        """When this life of the engine began, by its own word; 0 = not told."""
        self._due = asyncio.Event()
        self._was_ready = False
        """In this life of the engine."""

    @property
    def engine_answers(self) -> bool:
        """Whether the engine was well when it was last looked at."""
        return self._facts is not None

    @property
    def ready(self) -> str | None:
        """What is missing before the engine can be used through the schedulers; None = nothing.

        It latches: what was usable once stays so while the engine is well, whatever becomes of Redis. Else
        all would be unready as soon as Redis is away, and a disruption budget protects no unready Pod.
        """
        if self._facts is None:
            return "the engine does not answer"
        if self._was_ready:
            return None
        if self.instance is None:
            return "the engine is not registered"
        if not self.writer.attached:
            return "the index is not up to date"
        return None

    async def run(self) -> None:
        """Do its work until cancelled."""
        with suppress(ConnectionError):
            await self.client.connect()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_after_the_engine(), name="engine")
            tasks.create_task(self._write(), name="index")
            if self.config.store:
                tasks.create_task(self._check_pool(), name="pool")
            if self.config.store_client:
                tasks.create_task(self._prefetch(), name="prefetch")

    async def close(self) -> None:
        """Leave the registry and drop all connections; what is known stays in the journal."""
        await self._deregister("the sidecar ends")
        if self.draining:
            with suppress(*_AWAY):
                await self.writer.close(forget=True)
        await self._stop_stream()
        if self.prefetcher is not None:
            self.prefetcher.close()
        if self.pool is not None:
            await self.pool.close()
        await self.probe.close()
        await self.registry.close()
        await self.client.close()
        self.residency.close()

    async def start_drain(self) -> bool:
        """Ask schedulers to place nothing more here while this engine lives, whenever it is registered.

        Returns:
            Whether the mark stands in the registry. If not, schedulers have to ask (`/status`).
        """
        self.draining = True
        try:
            return await self.registry.mark(self.config.instance, InstanceState.DRAINING)
        except ConnectionError as error:
            _log.warning("the drain mark cannot be written yet", error=str(error))
            return False

    def saw_engine_gone(self) -> None:
        """Tell of an engine that is gone: it may be back, as another, before the next beat."""
        self._was_gone = True
        self._due.set()

    # The engine's life.

    async def _look_after_the_engine(self) -> None:
        while True:
            try:
                await self._beat()
                self._set_away(None)
            except _AWAY as error:
                self._set_away(error)
            except StaleEpochError as error:
                _log.warning("another life of the pool is known already", error=str(error))
            self.beaten_at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.heartbeat_s):
                    await self._due.wait()
            self._due.clear()

    async def _beat(self) -> None:
        if self._was_gone:
            self._was_gone = False
            await self._engine_died()
        health = await self.probe.health()
        if health is Health.DEAD:
            await self._engine_died()
            return
        if health is Health.ILL:
            self._ill += 1
            if self._ill >= ILL_MOST:
                self._was_ready = False
                await self._deregister("the engine is ill")
            return
        self._ill = 0
        if self._dead:
            self._dead = False
            # The hook of a container that failed its liveness probe has emptied the life that is over.
            self.draining = False
        if self._streaming is not None and self._streaming.done():
            await self._stop_stream()
            self._facts = None
        if self._facts is None and not await self._discover():
            return
        if self._still_catching_up():
            return
        report = await self._report()
        if self._began_anew():
            await self._engine_died()
            return
        await self._keep_registered(report)
        if self.pool is not None:
            await self.pool.beat()

    def _began_anew(self) -> bool:
        """Whether another engine answers, and the end of the one before fell between two looks."""
        if self.load is None or not self.load.began_s:
            return False
        before_s, self._began_s = self._began_s, self.load.began_s
        return 0 < before_s < self._began_s

    async def _discover(self) -> bool:
        try:
            asks = self.config.events_endpoint is None
            facts = self._facts = await self.probe.facts(ask_events=asks)
        except ConnectionError as error:
            _log.warning("the engine does not say what it is", error=str(error))
            return False
        source = event_source(self.config, facts)
        _log.info(
            "engine found",
            version=facts.version,
            block_size_tokens=facts.block_size_tokens,
            kv_blocks=facts.kv_blocks,
            events=source.endpoint if source else None,
        )
        record = self._record(facts)
        self.alarms = Alarms(record.block_size_tokens, source is not None)
        if self.pool is None and self.config.store:
            self.pool = Pool(
                pool_record(self.config.store, self.config.store_url, record),
                facts.model_root or self.config.model,
                registry=self.registry,
                index=self.index,
                client=self.client,
                namespace=self.config.namespace,
                residency=self.residency,
                instance=self.config.instance,
            )
        if source is None:
            _log.warning("the engine publishes no KV events: its cache stays invisible to placement")
            self.residency.forget()
            return True
        tracker = SequenceTracker(
            self.residency.sequence,
            self.residency.fingerprint,
            can_replay=source.replay_endpoint is not None,
        )
        self.stream = EventStream(
            source.endpoint, source.replay_endpoint, tracker, self._message, self._resync
        )
        self._streaming_since = time.monotonic()
        self._streaming = asyncio.create_task(self.stream.run(), name="events")
        self._streaming.add_done_callback(_log_if_failed)
        return True

    def _still_catching_up(self) -> bool:
        """Whether it is not known yet if the journal tells the truth about the engine."""
        if self.stream is None or self.instance is not None or self.stream.caught_up.is_set():
            return False
        if time.monotonic() - self._streaming_since < CATCH_UP_S:
            return True
        _log.warning("the engine's events cannot be had: what the journal tells of it is dropped")
        self.residency.forget()
        self.stream.caught_up.set()
        return False

    async def _report(self) -> EngineReport | None:
        try:
            self.load = await self.probe.load()
        except ConnectionError as error:
            _log.warning("the engine's metrics cannot be read", error=str(error))
            return None
        if self.alarms is not None:
            messages = self.stream.messages if self.stream is not None else 0
            self.alarms.observe(self.load, messages, self.findable.seen, time.monotonic())
        if not self.load.is_told:
            return None  # a report of zeros would tell schedulers that it idles
        return EngineReport(
            running=self.load.running,
            waiting=self.load.waiting,
            kv_usage=self.load.kv_usage,
            at_s=time.time() * self.config.time_scale,
        )

    async def _keep_registered(self, report: EngineReport | None) -> None:
        instance = self.instance
        if instance is not None:
            try:
                state = await self.registry.heartbeat(instance.id, instance.epoch, report)
            except StaleEpochError:
                # Meanwhile it may have been given up on purpose, to be registered anew.
                if self.instance is instance:
                    _log.warning("the registration was lost", epoch=instance.epoch)
                    self.instance = None
            else:
                if self.draining and state is InstanceState.READY:
                    await self.registry.mark(instance.id, InstanceState.DRAINING)
                return
        assert self._facts is not None
        resume = self.residency.epoch if self.residency.continues else 0
        self.instance = await self.registry.register(self._record(self._facts), resume_epoch=resume)
        self.writer.open(self.instance.epoch)
        _log.info("registered", epoch=self.instance.epoch, resumed=self.instance.epoch == resume)

    def _record(self, facts: Facts) -> Instance:
        state = InstanceState.DRAINING if self.draining else InstanceState.READY
        return instance_record(self.config, facts, state, self.residency.epoch)

    async def _engine_died(self) -> None:
        """Its process is gone and its cache with it: whoever comes back is another."""
        if self._dead:
            return
        self._dead = True
        _log.info("no engine is there")
        self._was_ready = False
        self._facts = None
        self.load = None
        self._began_s = 0.0
        self.alarms = None
        self._ill = 0
        await self._stop_stream()
        self.residency.forget()
        await self._deregister("the engine is gone")
        await self.writer.close(forget=True)

    async def _deregister(self, why: str) -> None:
        instance, self.instance = self.instance, None
        if instance is None:
            return
        _log.info("deregistering", epoch=instance.epoch, why=why)
        with suppress(ConnectionError):  # without Redis nobody sees it; in Redis it expires
            await self.registry.deregister(instance.id, instance.epoch)

    async def _stop_stream(self) -> None:
        streaming, self._streaming = self._streaming, None
        self.stream = None
        if streaming is not None:
            streaming.cancel()
            # How it ends is logged; that this task is cancelled meanwhile must not be swallowed.
            await asyncio.wait({streaming})

    # The engine's cache.

    def _message(self, sequence: int, payload: bytes) -> None:
        self.residency.message(sequence, payload)

    def _resync(self, reason: ResyncReason) -> None:
        self.residency.forget()

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            try:
                await self.findable.look(time.monotonic())
                if self.pool is not None:
                    self.pool.tell(self.residency.take_shared())
                    await self.pool.flush()
                if self.instance is not None:
                    await self.writer.flush()
                    self._was_ready = self.ready is None
            except StaleEpochError as error:
                _log.info("registering anew", why=str(error))
                self.instance = None
                self._due.set()
            except _AWAY as error:
                self._set_away(error)
                self.writer.doubt()

    async def _check_pool(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self.pool is not None:
                try:
                    await self.pool.check()
                except (*_AWAY, StaleEpochError) as error:
                    _log.warning("the pool cannot be checked now", error=str(error))

    async def _prefetch(self) -> None:
        while self.pool is None:  # noqa: ASYNC110 - the engine has to say what it is first
            await asyncio.sleep(self.config.heartbeat_s)
        self.prefetcher = Prefetcher(
            self.pool,
            PromotionStreams(self.client, self.config.namespace),
            module=self.config.store_client,
            address=self.config.store_address,
            host=urlsplit(self.config.advertised_url).hostname or "127.0.0.1",
        )
        await self.prefetcher.run()

    # The shared state.

    def _connected(self) -> None:
        self.writer.doubt()
        self._due.set()

    def _new_server(self, run_id: str) -> None:
        _log.warning("Redis came back as another process", run_id=run_id)

    def _set_away(self, error: Exception | None) -> None:
        if error is not None and not self.shared_state_away:
            _log.warning("the shared state is away; changes are kept", error=str(error))
        elif error is None and self.shared_state_away and self.client.connected:
            _log.info("the shared state is back")
        self.shared_state_away = error is not None or not self.client.connected

    def _password(self) -> str | None:
        file = self.config.redis_password_file
        return Path(file).read_text().strip() if file else None


def _log_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("reading events ended", error=repr(error))
