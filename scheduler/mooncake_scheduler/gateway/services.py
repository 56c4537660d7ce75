"""What serving a request needs, put together by `app`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncake_core.config.scheduler import SchedulerConfig
from mooncake_core.index import RedisIndex
from mooncake_core.ledger import Ledger
from mooncake_scheduler.clock import Clock
from mooncake_scheduler.gateway.accounting import Accounting
from mooncake_scheduler.gateway.decisions import Decisions
from mooncake_scheduler.gateway.engines import EngineIds
from mooncake_scheduler.gateway.holding import HoldingPlace
from mooncake_scheduler.gateway.ids import RequestIds
from mooncake_scheduler.gateway.lifecycle import RetryBudget
from mooncake_scheduler.gateway.placement import Placer
from mooncake_scheduler.gateway.rebinding import LateBinding
from mooncake_scheduler.gateway.residency import LocalResidency, SharedResidency
from mooncake_scheduler.gateway.roster import Roster
from mooncake_scheduler.gateway.tokens import Tokens
from mooncake_scheduler.gateway.turns import Turns
from mooncake_scheduler.metrics import GatewayMetrics
from mooncake_scheduler.promotion import TurnLog


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
    holding: HoldingPlace
    engine_ids: EngineIds = field(default_factory=EngineIds)
    budget: RetryBudget = field(default_factory=RetryBudget)
    ids: RequestIds = field(default_factory=RequestIds)
    shared_index: RedisIndex | None = None
    turns: Turns | None = None
    """Where prefills wait for their turns; None = nobody ever waits."""
    late_binding: LateBinding | None = None
    """What moves those who wait; None = they stay where they are."""
    turn_log: TurnLog | None = None
    """Where prompts are told of, so that the next turn's KV is in DRAM; None = nobody wants to know."""

    def counts(self) -> list[tuple[str, str, int]]:
        """What the index in use and the tokenising have counted: metric name, text, value."""
        index = self.shared_index or self.residency.local_index
        stats = index.stats
        conversations = self.tokens.conversations
        return [
            ("mooncake_index_matches", "Prompts looked up.", stats.matches),
            ("mooncake_index_failures", "Matches the shared index was late or away for.",
             self.residency.failures if isinstance(self.residency, SharedResidency) else 0),
            ("mooncake_token_estimates", "Prompts placed by their size: nobody could tokenise them.",
             self.tokens.estimates),
            ("mooncake_conversation_hits", "Chats of which an earlier turn was tokenised already.",
             0 if conversations is None else conversations.hits),
            ("mooncake_conversation_misses", "Chats tokenised from their start.",
             0 if conversations is None else conversations.misses),
            ("mooncake_index_probes", "Blocks looked at by matches.", stats.looks),
            ("mooncake_index_holes", "Matches that met a hole in a holder's prefix.", stats.holes),
            ("mooncake_index_overflows", "Matches that met a block with too many holders.", stats.overflows),
        ]  # fmt: skip
