"""What a router can see of the simulated engine is what it sees of vLLM, up to a list with reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mooncake_testing.engine_exchange import EnginePair, facts_of
from mooncake_testing.vllm_engine import VllmPair

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]
DIFFERENCES = Path(__file__).parent / "differences.yaml"


def test_the_scripted_exchange_shows_no_difference_that_is_not_listed_with_its_reason(
    vllm_pair: VllmPair, simulated_pair: EnginePair
) -> None:
    real = facts_of(vllm_pair.addresses())
    simulated = facts_of(simulated_pair)
    listed = yaml.safe_load(DIFFERENCES.read_text())
    assert all(entry["why"].strip() for entry in listed)
    expected = {fact for entry in listed for fact in entry["facts"]}
    found = {f"vllm: {fact}" for fact in real - simulated}
    found |= {f"simulated: {fact}" for fact in simulated - real}
    unlisted, gone = sorted(found - expected), sorted(expected - found)
    assert not unlisted, "\n".join(["differences that nobody has explained:", *unlisted])
    assert not gone, "\n".join(["listed differences that are gone; take them off the list:", *gone])
