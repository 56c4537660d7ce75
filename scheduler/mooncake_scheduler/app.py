"""The scheduler process: started, at work in the background, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog
from prometheus_client.core import Metric

from mooncake_core.config.scheduler import SchedulerConfig
from mooncake_core.registry import Role
from mooncake_scheduler.admin import AdminServer, build_api
from mooncake_scheduler.gateway.attempt import RELEASE_GRACE_S
from mooncake_scheduler.gateway.auth import AdminToken, ApiKeys
from mooncake_scheduler.gateway.datapath import DataPath
from mooncake_scheduler.gateway.errors import plain_error_body
from mooncake_scheduler.gateway.health import Probes
from mooncake_scheduler.gateway.http1 import HttpServer, ServerLimits
from mooncake_scheduler.gateway.services import Services
from mooncake_scheduler.gateway.sidecar_probes import SidecarProbes
from mooncake_scheduler.gateway.tokenizer_parity import TokenizerParity
from mooncake_scheduler.instance_metrics import instance_families
from mooncake_scheduler.metrics import Exposition
from mooncake_scheduler.promotion import Promoter
from mooncake_scheduler.shared import SharedState

_log = structlog.get_logger(__name__)

ROSTER_EVERY_S = 0.5
LEDGER_EVERY_S = 0.05
TICK_S = 0.02
SLOW_TICK_S = 1.0
PROBE_EVERY_S = 1.0


class Scheduler:
    """One scheduler process.

    Args:
        config: what it was told.
        services: the parts of the gateway.
        keys: who may come in at the serving port.
        admin_token: who may come in at the admin port.
        shared: the state on Redis; None = all in memory.
        parity: compares the gateway's tokeniser with the engines'.
        promoter: plans what is read ahead of turns; None = nothing is.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        services: Services,
        keys: ApiKeys,
        admin_token: AdminToken,
        shared: SharedState | None,
        parity: TokenizerParity,
        promoter: Promoter | None = None,
    ) -> None:
        self.config = config
        self.services = services
        self.admin_token = admin_token
        self.shared = shared
        self._parity = parity
        self._promoter = promoter
        self.draining = False
        self.serving_port = 0
        self.admin_port = 0
        promoted = [] if promoter is None else [promoter.families]
        self._exposition = Exposition(services.metrics.families, self._instance_families, *promoted)
        self.datapath = DataPath(services, keys, self.why_not_ready, self.metrics_text)
        limits = ServerLimits(body_bytes=config.max_body_bytes)
        self.server = HttpServer(self.datapath, limits, plain_error_body)
        self._admin = AdminServer(build_api(self))
        self._keys = keys
        self._tasks: list[asyncio.Task[None]] = []
        self._probes = Probes(services.roster, self._came_back) if shared is None else None
        self._sidecars = None if shared is None else SidecarProbes(services.roster)

    # -- life

    async def start(self) -> None:
        """Connect, look who is there, and listen.

        Raises:
            OSError: an address cannot be bound.
        """
        if self.shared is not None:
            await self.shared.start()
        await self._refresh_roster()
        serving, admin = self.config.serving, self.config.admin
        self.admin_port = await self._admin.start(admin.host, admin.port)
        self.serving_port = await self.server.start(serving.host, serving.port)
        self._every(ROSTER_EVERY_S, self._refresh_roster)
        self._every(LEDGER_EVERY_S, self._refresh_ledger)
        self._every(SLOW_TICK_S, self._slow_tick)
        self._every(SLOW_TICK_S, self._parity.compare_new)
        if self._probes is not None:
            self._every(PROBE_EVERY_S, self._probes.probe_all)
        if self._sidecars is not None:
            self._every(PROBE_EVERY_S, self._sidecars.look)
        if self._promoter is not None:
            self._every(self._promoter.every_s, self._promoter.step)
        self._tasks.append(asyncio.create_task(self._tick(), name="deadlines"))
        _log.info("serving", host=serving.host, port=self.serving_port, cluster=self.config.cluster)

    async def stop(self, streams_s: float | None = None) -> None:
        """Announce the end, stop accepting, let streams end, give back what is reserved.

        Args:
            streams_s: instead of the configuration's.
        """
        self.draining = True
        stopping = self.config.stopping
        _log.info("stopping", announced_s=stopping.announced_s, streams=len(self.datapath.flows))
        self.server.announce_end()
        await asyncio.sleep(stopping.announced_s)
        await self.server.stop(stopping.streams_s if streams_s is None else streams_s)
        await self._free_staged()
        await self._admin.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        with contextlib.suppress(ConnectionError):
            await self.services.ledger.close()
        self.services.engine_ids.close()
        self.services.tokens.close()
        self.services.roster.close()
        if self._sidecars is not None:
            self._sidecars.close()
        if self._promoter is not None:
            await self._promoter.leave()
        if self.shared is not None:
            await self.shared.close()
        # One turn of the loop lets connection_lost run everywhere.
        await asyncio.sleep(0)

    async def _free_staged(self) -> None:
        """Let requests whose clients are gone see to it that their staged KV is taken: nobody else would."""
        until_s = time.monotonic() + RELEASE_GRACE_S
        while self.datapath.flows and time.monotonic() < until_s:  # noqa: ASYNC110 - many may end it
            await asyncio.sleep(TICK_S)

    def why_not_ready(self) -> str:
        """Why requests cannot be served now; empty when they can."""
        if self.draining:
            return "the scheduler is stopping"
        if not any(team.decode for team in self.services.roster.teams()):
            return "no decode instance is ready"
        return ""

    def degradations(self) -> list[str]:
        """What does not work as it should, in words."""
        found = []
        if self.services.roster.registry_away:
            found.append("the registry is away: the last instances known are used")
        if self.shared is not None:
            if self.shared.away:
                found.append("Redis is away: index and ledger are this scheduler's own")
            elif self.services.residency.mode == "local":
                found.append("Redis is slow: the index is this scheduler's own")
        return found

    def metrics_text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return self._exposition.text()

    def _instance_families(self) -> Iterable[Metric]:
        services = self.services
        in_redis = None if self.shared is None else self.shared.index_bytes
        return instance_families(services, degraded=bool(self.degradations()), index_bytes_in_redis=in_redis)

    # -- in the background

    def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(seconds)
                try:
                    await work()
                except Exception:
                    _log.exception("background work failed", work=work.__qualname__)

        self._tasks.append(asyncio.create_task(repeat(), name=work.__qualname__))

    async def _refresh_roster(self) -> None:
        services = self.services
        roster = services.roster
        await roster.refresh()
        services.placer.worlds.reported.hear(
            roster.reports,
            [member.instance for member in roster.members.values()],
            services.placer.conductor.costs,
            services.clock.now_s(),
            services.clock.scale,
        )
        await services.residency.follow(
            [*(member.instance for member in roster.members.values()), *roster.stores.values()]
        )
        services.engine_ids.keep([member.instance for member in roster.members.values()])
        for member in list(roster.members.values()):
            instance = member.instance
            if instance.connector != "MooncakeConnector" or instance.role is Role.DECODE:
                continue
            if services.engine_ids.needed(instance, member.upstream.generation):
                # Asked ahead of the first request that needs it; a failure is met again by that request.
                services.engine_ids.asking(instance, member.upstream.generation).add_done_callback(_seen)

    async def _refresh_ledger(self) -> None:
        with contextlib.suppress(ConnectionError):
            await self.services.ledger.refresh(self.services.clock.now_s())
        # Other schedulers' requests end too, and instances come.
        self.services.holding.look()
        if self.shared is not None:
            # Only a shared registry brings reports that this is compared with.
            loads = self.services.ledger.loads(self.services.clock.now_s())
            self.services.placer.worlds.reported.know(loads, time.monotonic())

    async def _slow_tick(self) -> None:
        self.server.check_time(time.monotonic())
        self.admin_token.refresh()
        if self._keys.refresh():
            self.services.placer.conductor.set_weights(self._keys.weights)
        if self.shared is not None:
            await self.shared.sweep()
            await self.shared.measure()

    async def _tick(self) -> None:
        """Deadlines, turns, and how late the loop is."""
        lag, turns = self.services.metrics.loop_lag_s, self.services.turns
        late_binding = self.services.late_binding
        expected_s = time.monotonic() + TICK_S
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            lag.observe(max(0.0, now_s - expected_s))
            try:
                self.datapath.expire(now_s)
                if turns is not None:
                    turns.look_everywhere()
                if late_binding is not None:
                    late_binding.look(now_s)
            except Exception:
                # Without deadlines and turns nothing would ever end.
                _log.exception("deadlines or turns failed")
            expected_s = time.monotonic() + TICK_S

    def _came_back(self, instance_id: str) -> None:
        self.services.engine_ids.forget(instance_id)


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
