"""Whoever asks for its share gets it, however hard others push, and however large its requests are."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_core.config.scheduler import AdmissionMode
from mooncake_scheduler.conductor.admission import Admission
from mooncake_scheduler.conductor.conductor import Conductor
from mooncake_scheduler.conductor.cost import CostModels
from mooncake_scheduler.conductor.model import Refused
from mooncake_scheduler.policies import create
from mooncake_testing.worlds import ROUND_COSTS, Script, ask, prefill, world

TARGET_S = 10.0
SPAN_S = 400.0


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    large_tokens=st.integers(500, 4_000),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    push=st.floats(2.0, 4.0),
)
def test_a_tenant_that_was_refused_so_far_gets_its_share_of_what_is_given(
    seed: int, large_tokens: int, weight: float, push: float
) -> None:
    """One instance that computes 1 000 tokens a second, flooded with small prompts by one tenant.

    The other comes later, to a full queue, and asks for somewhat more than its share.
    """
    chance = random.Random(seed)
    share = weight / (1 + weight)
    conductor = Conductor(
        create("load-balance"), Admission(AdmissionMode.PREDICTIVE), CostModels(default=ROUND_COSTS),
        Script(), weights={"late": weight},
    )  # fmt: skip
    rates = {"flood": push, "late": 1.3 * share * 1_000 / large_tokens}
    sizes = {"flood": 1_000, "late": large_tokens}
    comes_s = {tenant: begin_s + chance.expovariate(rates[tenant])
               for tenant, begin_s in (("flood", 0.0), ("late", 30.0))}  # fmt: skip
    given_tokens: Counter[str] = Counter()
    now_s = queued_s = 0.0
    while True:
        tenant = min(comes_s, key=lambda each: comes_s[each])
        queued_s = max(0.0, queued_s - (comes_s[tenant] - now_s))
        now_s = comes_s[tenant]
        if now_s > SPAN_S:
            break
        comes_s[tenant] += chance.expovariate(rates[tenant])
        one = ask(sizes[tenant], 1, tenant=tenant)
        scene = world([prefill("p", queued_s=queued_s)], ttft_s=TARGET_S, now_s=now_s, explain=False)
        if isinstance(conductor.decide(one, scene), Refused):
            conductor.observe_refused(one, now_s)
            continue
        conductor.observe_admitted(one, now_s)
        queued_s += sizes[tenant] / 1_000
        # The first minute of both is the way there.
        if now_s > 100:
            given_tokens[tenant] += sizes[tenant]
    # Refusals are what it wants by, so with few large requests a part of the share is lost; never all of it.
    assert given_tokens["late"] >= 0.3 * share * given_tokens.total()
    assert given_tokens.total() >= 0.9 * 1_000 * (SPAN_S - 100), "and nothing is left idle for it"
