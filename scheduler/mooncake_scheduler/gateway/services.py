"""What serving a request needs, put together by `app`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mooncake_core.config.scheduler import SchedulerConfig
from mooncake_core.ledger import Ledger

from mooncake_scheduler.clock import Clock
from mooncake_scheduler.gateway.accounting import Accounting
from mooncake_scheduler.gateway.decisions import Decisions
from mooncake_scheduler.gateway.engines import EngineIds
from mooncake_scheduler.gateway.ids import RequestIds
from mooncake_scheduler.gateway.lifecycle import RetryBudget
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.residency import LocalResidency, SharedResidency
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.gateway.tokens import Tokens
from mooncake_scheduler.metrics import GatewayMetrics


@dataclass(slots=True)
class Services:
    """The parts of one gateway."""

    config: SchedulerConfig
    clock: Clock
    roster: Roster
    placer: Placer
    ledger: Ledger
    residency: LocalResidency | SharedResidency
    tokens: Tokens
    metrics: GatewayMetrics
    accounting: Accounting
    decisions: Decisions
    engine_ids: EngineIds = field(default_factory=EngineIds)
    budget: RetryBudget = field(default_factory=RetryBudget)
    ids: RequestIds = field(default_factory=RequestIds)


class Closable(Protocol):
    """Something that is closed at the end."""

    async def close(self) -> None: ...
