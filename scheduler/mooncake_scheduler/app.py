"""The scheduler process: its parts put together, started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import Metric

from mooncake_core.config.base import ConfigError
from mooncake_core.config.scheduler import AdmissionMode, SchedulerConfig
from mooncake_core.ledger import Ledger, MemoryLedger
from mooncake_core.profiles import PROFILES
from mooncake_core.promotion import PromotionStreams
from mooncake_core.registry import Registry, Role
from mooncake_core.registry.static import StaticRegistry
from mooncake_scheduler import policies
from mooncake_scheduler.admin import AdminServer, build_api
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.gateway.accounting import Accounting
from mooncake_scheduler.gateway.attempt import RELEASE_GRACE_S
from mooncake_scheduler.gateway.auth import AdminToken, ApiKeys
from mooncake_scheduler.gateway.datapath import DataPath
from mooncake_scheduler.gateway.decisions import Decisions
from mooncake_scheduler.gateway.errors import plain_error_body
from mooncake_scheduler.gateway.health import Probes
from mooncake_scheduler.gateway.holding import HoldingPlace
from mooncake_scheduler.gateway.http1 import HttpServer, ServerLimits
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.rebinding import LateBinding
from mooncake_scheduler.gateway.residency import LocalResidency, SharedResidency
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.gateway.services import Services
from mooncake_scheduler.gateway.sidecar_probes import SidecarProbes
from mooncake_scheduler.gateway.tokenizer_parity import TokenizerParity
from mooncake_scheduler.gateway.tokens import ModelFolder, Tokens
from mooncake_scheduler.gateway.turns import Turns
from mooncake_scheduler.gateway.worlds import Worlds
from mooncake_scheduler.instance_metrics import instance_families
from mooncake_scheduler.metrics import Exposition, GatewayMetrics
from mooncake_scheduler.model_config import kv_bytes_per_token
from mooncake_scheduler.promotion import SSD_BYTES_PER_S, Promoter, TurnLog
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
            self._promoter.close()
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


def build_scheduler(config: SchedulerConfig) -> Scheduler:
    """Put a scheduler together.

    Raises:
        ConfigError: the configuration cannot be used; the message says what to write instead.
    """
    clock = Clock(config.time_scale)
    keys = ApiKeys(_path(config.auth.api_keys_file))
    admin_token = AdminToken(_path(config.auth.admin_token_file))
    shared = None if config.redis_url is None else SharedState(config)
    registry: Registry = _static_registry(config) if shared is None else shared.registry
    ledger: Ledger = MemoryLedger() if shared is None else shared.ledger
    local_reserve = None if shared is None else shared.ledger.reserve_locally
    local = LocalResidency()
    residency = local if shared is None else SharedResidency(shared.index, local)
    roster = Roster(registry, config.model, count_lives=shared is None)
    conductor = _conductor(config, keys)
    folder = None if config.model_path is None else ModelFolder(Path(config.model_path))
    parity = TokenizerParity(folder, roster, config.model)
    metrics = GatewayMetrics(config.slo.ttft_s, config.slo.tbt_s)
    decisions = Decisions()
    turns = Turns(conductor.order or QueueOrder(), ledger, roster, clock)
    worlds = Worlds(conductor, roster, ledger, clock, config.slo)
    placer = Placer(conductor, roster, clock, worlds, local_reserve, metrics, turns)
    late_binding = None
    if conductor.rebinding is not None:
        late_binding = LateBinding(conductor.rebinding, turns, placer, roster, ledger, clock)
    promoter, turn_log = _promotion(config, shared, roster)
    services = Services(
        config=config,
        clock=clock,
        roster=roster,
        placer=placer,
        ledger=ledger,
        residency=residency,
        tokens=Tokens(folder, roster.tokenizing_engine, parity.trusted),
        metrics=metrics,
        accounting=Accounting(conductor, ledger, clock, metrics, decisions),
        decisions=decisions,
        holding=HoldingPlace(placer, ledger, clock, None if shared is None else shared.ledger.seat_locally),
        shared_index=None if shared is None else shared.index,
        turns=turns,
        late_binding=late_binding,
        turn_log=turn_log,
    )
    return Scheduler(config, services, keys, admin_token, shared, parity, promoter)


def _promotion(
    config: SchedulerConfig, shared: SharedState | None, roster: Roster
) -> tuple[Promoter | None, TurnLog | None]:
    """What reads SSD ahead of turns, where that is wanted.

    Raises:
        ConfigError: it is, without Redis.
    """
    if not config.promoted_store:
        return None, None
    if shared is None:
        raise ConfigError("promoted_store: what is read ahead is told over Redis: give redis_url, too")
    streams = PromotionStreams(shared.client, config.namespace)
    profile = PROFILES.get(config.profile or "")
    promoter = Promoter(
        streams,
        roster,
        config.promoted_store,
        who=uuid.uuid4().hex,
        time_scale=config.time_scale,
        ssd_bytes_per_s=SSD_BYTES_PER_S if profile is None else profile.ssd_bytes_per_s,
    )
    return promoter, TurnLog(streams, roster, config.promoted_store)


def _conductor(config: SchedulerConfig, keys: ApiKeys) -> Conductor:
    routing, admission = config.routing, config.admission
    try:
        policy = policies.create(
            routing.policy,
            balancing_threshold=routing.balancing_threshold,
            disaggregation_threshold_tokens=routing.disaggregation_threshold_tokens,
            shortest_first=routing.queue_order == "shortest-first",
        )
    except policies.UnknownPolicyError as error:
        raise ConfigError(f"routing.policy: {error}") from error
    return Conductor(
        policy,
        Admission(
            admission.mode,
            admission.headroom,
            holding=admission.mode is AdmissionMode.PREDICTIVE,
            longest_hold_s=config.first_token_timeout_s * config.time_scale,
        ),
        starting_costs(config),
        random.Random(routing.seed),
        priority_floor=admission.priority_floor,
        weights=keys.weights,
        default_output_tokens=config.default_output_tokens,
        ttft_percentile=config.slo.ttft_percentile,
    )


def starting_costs(config: SchedulerConfig) -> CostModels:
    """The cost models before anything was learnt.

    Raises:
        ConfigError: the profile is unknown.
    """
    if config.profile is None:
        return CostModels(default=CostModel(kv_bytes_per_token=_kv_bytes_per_token(config), cold=True))
    profile = PROFILES.get(config.profile)
    if profile is None:
        raise ConfigError(f"profile: {config.profile!r} is unknown: write one of {', '.join(PROFILES)}")
    # Else a pool of several Pods would be refused work, until it is learnt how much more it can do.
    by_pool = {
        pool: CostModel.from_profile(profile.over(shape.pods, tensor=shape.tensor, pipeline=shape.pipeline))
        for pool, shape in config.shapes.items()
    }
    return CostModels(by_pool, default=CostModel.from_profile(profile))


def _kv_bytes_per_token(config: SchedulerConfig) -> int:
    """As the model folder says; 0 = nobody does."""
    if config.model_path is None or config.profile is not None:
        return 0
    found = kv_bytes_per_token(Path(config.model_path), config.kv_cache_dtype)
    if found is None:
        _log.info(
            "config.json does not say how large KV is: transfers are counted in tokens",
            folder=config.model_path,
        )
    return found or 0


def _static_registry(config: SchedulerConfig) -> StaticRegistry:
    if config.instances_file is None:
        raise ConfigError("instances_file: without redis_url the instances stand in a file: name it")
    return StaticRegistry(Path(config.instances_file))


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def wanted_ports(config: SchedulerConfig, serving: int | None, admin: int | None) -> SchedulerConfig:
    """The configuration with ports from the command line."""
    changes: dict[str, object] = {}
    if serving is not None:
        changes["serving"] = config.serving.model_copy(update={"port": serving})
    if admin is not None:
        changes["admin"] = config.admin.model_copy(update={"port": admin})
    return config.model_copy(update=changes)


__all__ = ["Scheduler", "build_scheduler", "wanted_ports"]
