"""Entries 7 and 8: load on every path counts, and neither load nor caches alone decide."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from random import Random

import pytest

from mooncake_scheduler.policies import create
from mooncake_testing.gateway import gateway
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.waiting import until
from mooncake_testing.worlds import ask, prefill, world

QUEUES_S = (0.0, 0.3, 1.0, 4.0)
PREFIXES = (0, 400, 900)


@pytest.mark.parametrize("policy", ["algorithm-1", "kv-centric"])
@pytest.mark.parametrize("queues_s", list(itertools.product(QUEUES_S, repeat=2)), ids=str)
def test_whatever_the_skew_of_queues_and_caches_the_request_goes_where_it_is_served_first(
    policy: str, queues_s: tuple[float, float]
) -> None:
    """1 000 tokens at 1 ms each: the queue, and what the cache does not hold, weigh in the same seconds."""
    for prefixes in itertools.product(PREFIXES, repeat=2):
        views = [
            prefill(f"p{n}", hbm=held, queued_s=queued_s)
            for n, (held, queued_s) in enumerate(zip(prefixes, queues_s, strict=True))
        ]
        served_s = {view.instance.id: view.load.queued_s + (1_000 - view.hbm_tokens) * 1e-3 for view in views}
        placement = create(policy).place(ask(1_000), world(views), Random(1))
        assert placement.prefill is not None
        chosen_s = served_s[placement.prefill.id]
        assert chosen_s <= min(served_s.values()) * 1.006, (prefixes, placement.prefill.id)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_work_given_on_any_path_keeps_new_prompts_away_and_old_ones_while_it_pays(
    tmp_path: Path, path: str, stream: bool
) -> None:
    fleet = [ScriptedEngine(f"b{n}") for n in range(2)]
    tokens = list(range(5_000))
    for engine in fleet:
        engine.tokenize = lambda body: tokens
    hold = asyncio.Event()
    async with (
        engines(*fleet),
        gateway(
            tmp_path, [engine.instance() for engine in fleet], profile="llama3-70b-8xa800", time_scale=0.01
        ) as running,
    ):
        hot = list(range(10_000, 18_000))
        await running.complete(prompt=hot)
        owner = next(engine for engine in fleet if engine.legs)
        other = next(engine for engine in fleet if not engine.legs)
        # A little load (0.04 s) on the owner of a prefix that saves 0.9 s: it is still the place to go.
        owner.usual = other.usual = Act(hold=hold)
        waiting = [asyncio.ensure_future(running.complete(prompt=[*hot, *range(300)]))]
        await owner.leg(2)
        waiting.append(asyncio.ensure_future(running.complete(prompt=[*hot, *range(300, 600)])))
        await owner.leg(3)
        # Work that came in on this path, on the idle one as it is new to both.
        body = (
            {"prompt": tokens}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        sent = {"model": "tiny", "max_tokens": 4, "stream": stream, **body}
        waiting.append(asyncio.ensure_future(running.client.post(path, json=sent)))
        await other.leg(1)
        ledger, clock = running.scheduler.services.ledger, running.scheduler.services.clock
        assert ledger.loads(clock.now_s())[other.name].queued_s > 0.3
        # And what is new now goes to the owner of the hot prefix: the other one has more to do.
        waiting.append(asyncio.ensure_future(running.complete(prompt=list(range(50_000, 51_000)))))
        await owner.leg(4)
        hold.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 4
        await until(lambda: running.reserved == 0)
