"""The Conductor: what is known in, a decision out. No I/O, no clock, no chance of its own."""

from __future__ import annotations

from collections.abc import Iterator

from mooncake_core.ledger import Limits, Reservation

from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.model import (
    Ask,
    Chance,
    Placement,
    Policy,
    ProposingPolicy,
    Refused,
    World,
)


class Conductor:
    """Places requests by a policy, admits them by a rule, and learns from what is observed.

    One object serves one model. It is driven alike by the live scheduler and by a simulator: the caller
    gathers a `World`, asks `decide`, carries the answer out, and reports what happened through `observe_*`.
    The same inputs in the same order with the same chance give the same answers.
    """

    def __init__(
        self,
        policy: Policy,
        admission: Admission,
        costs: CostModels,
        chance: Chance,
    ) -> None:
        """Puts the parts together.

        Args:
            policy: Chooses the pair (`policies.create`).
            admission: Decides whether the pair may be used.
            costs: The cost models; put them into every `World`. Observations refine them in place.
            chance: Breaks ties (`random.Random(seed)`).
        """
        self.policy = policy
        self.admission = admission
        self.costs = costs
        self._chance = chance
        self._propose = policy.propose if isinstance(policy, ProposingPolicy) else None

    def decide(self, ask: Ask, world: World) -> Placement | Refused:
        """Where the request goes, or why it is refused.

        Raises:
            NoInstanceError: nothing can serve it now.
        """
        first: Refused | None = None
        for placement in self._proposals(ask, world):
            refused = self.admission.judge(ask, placement, world)
            if refused is None:
                return placement
            first = first or refused
        assert first is not None, "a policy proposes at least one placement"
        return first

    def limits(self, ask: Ask, placement: Placement, world: World) -> Limits:
        """The bounds with which `Ledger.reserve` checks the placement again, over all schedulers."""
        return self.admission.limits(ask, placement, world)

    def reservation(self, ask: Ask, placement: Placement, now_s: float) -> Reservation:
        """What the placement is predicted to take, for the ledger."""
        prefill_end_s = now_s + placement.ttft_s
        return Reservation(
            id=ask.id,
            prefill=None if placement.prefill is None else placement.prefill.id,
            prefill_cost_s=placement.prefill_s,
            decode=placement.decode.id,
            kv_tokens=ask.prompt_tokens + ask.output_tokens,
            prefill_end_s=prefill_end_s,
            decode_end_s=prefill_end_s + ask.output_tokens * placement.tbt_s,
            tenant=ask.tenant,
        )

    def _proposals(self, ask: Ask, world: World) -> Iterator[Placement]:
        if self._propose is not None:
            return self._propose(ask, world, self._chance)
        return iter((self.policy.place(ask, world, self._chance),))
