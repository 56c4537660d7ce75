"""A gateway that was told nothing of its engines learns them from the work it gives them, also under load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_core.profiles import LLAMA3_70B_A800
from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_scheduler.conductor.cost import CostModel, class_of
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import until

SCALE = 10.0
TRUTH = CostModel.from_profile(LLAMA3_70B_A800)
"""What the engines are really like."""


@pytest.fixture(scope="module")
def simulated() -> Iterator[Simulated]:
    with Simulated(time_scale=SCALE) as processes:
        yield processes


def instance(role: Role, engine: SimulatedProcess) -> Instance:
    handing_over = {"connector": "MooncakeConnector", "bootstrap_url": engine.bootstrap_url}
    return Instance(
        id=str(role), role=role, url=engine.url, model="tiny", pool=str(role), revision="1",
        engine=EngineKind.SIMULATED, engine_version="1", block_size_tokens=16,
        **({} if role is Role.BOTH else handing_over),  # type: ignore[arg-type]
    )  # fmt: skip


def learned(running: Gateway, one: Instance) -> CostModel:
    return running.scheduler.services.placer.conductor.costs.of_class(class_of(one))


async def ask_until(running: Gateway, one: Instance, known: Callable[[CostModel], bool]) -> None:
    """A busy machine reads answers in heaps and out of turn, which teaches nothing: it takes longer then."""
    for turn in range(6):
        await ask_for_many(running, 40, 6_000, seed=turn)
        await running.settled()
        if known(learned(running, one)):
            return


async def ask_for_many(running: Gateway, count: int, most_tokens: int, seed: int) -> None:
    """All at once, so that almost every prompt waits for its turn."""
    chance = random.Random(seed)
    prompts = [
        [10_000 + 1_000 * seed + number, *range(1_000, 1_000 + chance.randint(500, most_tokens))]
        for number in range(count)
    ]
    answers = await asyncio.gather(
        *(running.complete(prompt=prompt, max_tokens=24, ignore_eos=True, stream=True) for prompt in prompts)
    )
    assert [answer.status_code for answer in answers] == [200] * count


async def greeted(running: Gateway) -> bool:
    return (await running.complete()).status_code == 200


def assert_learned_without_the_queue(model: CostModel, tokens: int) -> None:
    """Far from what a prompt took with its waiting, twenty times as long; and this machine may be slow."""
    assert model.knows_prefill
    assert 0.5 * TRUTH.prefill_s(tokens, 0) < model.prefill_s(tokens, 0) < 10 * TRUTH.prefill_s(tokens, 0)


async def test_prefills_that_waited_teach_what_they_took_and_hand_overs_what_a_transfer_does(
    tmp_path: Path, simulated: Simulated
) -> None:
    connector = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    first, last = (
        instance(role, simulated.engine(connector=connector)) for role in (Role.PREFILL, Role.DECODE)
    )
    async with gateway(tmp_path, [first, last], time_scale=SCALE) as running:
        assert not learned(running, first).knows_prefill
        assert learned(running, first).transfer_s(10_000) == 0
        # The pair learns of each other first: under load that takes longer than an engine waits for it.
        await until(lambda: greeted(running))
        await ask_until(running, first, lambda model: model.knows_prefill and model.transfer_s(9_000) > 0)
        assert_learned_without_the_queue(learned(running, first), 4_000)
        assert learned(running, first).transfer_s(10_000) > 0
        assert running.scheduler.services.roster.members[first.id].pace.under_way == 0


async def test_engines_that_do_both_are_learned_without_pools(tmp_path: Path, simulated: Simulated) -> None:
    both = instance(Role.BOTH, simulated.engine())
    async with gateway(tmp_path, [both], time_scale=SCALE) as running:
        await ask_until(running, both, lambda model: model.knows_prefill)
        assert_learned_without_the_queue(learned(running, both), 4_000)
        assert running.scheduler.services.roster.members[both.id].pace.under_way == 0
