"""A scheduler out of its configuration: which parts there are, and what each is given."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import structlog

from mooncake_core.config.base import ConfigError
from mooncake_core.config.scheduler import AdmissionMode, SchedulerConfig
from mooncake_core.ledger import Ledger, MemoryLedger
from mooncake_core.profiles import PROFILES
from mooncake_core.promotion import PromotionStreams
from mooncake_core.registry import Registry
from mooncake_core.registry.static import StaticRegistry
from mooncake_scheduler import policies
from mooncake_scheduler.app import Scheduler
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModel, CostModels
from mooncake_scheduler.conductor.order import QueueOrder
from mooncake_scheduler.gateway.accounting import Accounting
from mooncake_scheduler.gateway.auth import AdminToken, ApiKeys
from mooncake_scheduler.gateway.decisions import Decisions
from mooncake_scheduler.gateway.holding import HoldingPlace
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.rebinding import LateBinding
from mooncake_scheduler.gateway.residency import LocalResidency, SharedResidency
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.gateway.services import Services
from mooncake_scheduler.gateway.tokenizer_parity import TokenizerParity
from mooncake_scheduler.gateway.tokens import ModelFolder, Tokens
from mooncake_scheduler.gateway.turns import Turns
from mooncake_scheduler.gateway.worlds import Worlds
from mooncake_scheduler.metrics import GatewayMetrics
from mooncake_scheduler.model_config import kv_bytes_per_token
from mooncake_scheduler.promotion import SSD_BYTES_PER_S, Promoter, TurnLog
from mooncake_scheduler.shared import SharedState

_log = structlog.get_logger(__name__)


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
