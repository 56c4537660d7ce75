"""kill -9 under load: every client hears what became of its request, and what the schedulers share heals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from mooncake_operator.planning.manifests.transfer import STAGED_KV_S
from mooncake_simulator.engine.options import DEAD_PEER_GRACE_S
from mooncake_simulator.workloads import SessionShape, generate, parse_distribution
from mooncake_testing.cluster import Cluster, until_none
from mooncake_testing.waiting import eventually
from mooncakectl.replay import Outcome, OutcomeKind, ReplayOptions, ReplayResult, replay

pytestmark = pytest.mark.timeout(360)

HEALED_WITHIN_S = 30.0
CONNECTION_DIES_WITHIN_S = 1.0
# A decode engine in the midst of a pull hears nothing of its prefill engine's death, and gives up last.
GIVEN_UP_WITHIN_S = STAGED_KV_S + DEAD_PEER_GRACE_S

# Conversations of three turns over shared system prompts; two prefill instances are busy most of the time.
SHAPE = SessionShape(
    turns=parse_distribution("const:3"),
    gap_s=parse_distribution("lognormal:15s:0.3"),
    sessions_per_s=0.6,
    system_prompts=2,
    system_tokens=parse_distribution("const:1024"),
    first_tokens=parse_distribution("lognormal:9k:0.4"),
    user_tokens=parse_distribution("lognormal:1200:0.5"),
    output_tokens=parse_distribution("lognormal:150:0.5"),
)
SESSIONS = 30
SPEED = 10.0


@dataclass
class Aftermath:
    """What a load saw in whose midst a process was killed."""

    result: ReplayResult
    killed_s: float
    """On the clock of the outcomes."""

    def ended(self, kind: OutcomeKind) -> list[Outcome]:
        return [outcome for outcome in self.result.outcomes if outcome.kind is kind]


async def kill_under_load(
    cluster: Cluster, pod: str, container: str, *, when: Callable[[], bool], seed: int
) -> Aftermath:
    """Replay conversations, and kill a process once so many are under way and the moment is right."""
    under_way = asyncio.Event()

    def on_progress(progress: object) -> None:
        if progress.sent >= SESSIONS:  # type: ignore[attr-defined]
            under_way.set()

    options = ReplayOptions(url=cluster.endpoint, speed=SPEED, seed=seed, timeout_s=60)
    load = asyncio.create_task(replay(generate(SESSIONS, seed, SHAPE), options, on_progress))
    await under_way.wait()
    await asyncio.to_thread(eventually, when, f"{pod} has work in hand", 10.0)
    killed_s = time.monotonic()
    killed = cluster.kill(pod, container)
    result = await load
    print(
        f"{pod}/{container} killed: {result.completed} completed, {result.failed} failed"
        f" {result.failed_by_reason}, {result.lost} lost {result.lost_by_reason}"
    )
    await asyncio.to_thread(
        eventually, lambda: cluster.is_replaced(pod, container, killed), f"{pod} runs again"
    )
    return Aftermath(result, killed_s)


def heals(cluster: Cluster, killed_s: float) -> None:
    """What Redis holds becomes the union of what engines hold, and the ledger becomes empty, in time.

    The index within 30 s of the kill, the ledger within 30 s of the load's end, which is now.
    """
    ended_s = time.monotonic()
    healed_s = killed_s + HEALED_WITHIN_S
    eventually(cluster.is_whole, "all schedulers see all instances", healed_s - time.monotonic())
    until_none(cluster.index_disagrees, "Redis holds what engines hold", healed_s - time.monotonic())
    index_s = time.monotonic() - killed_s
    until_none(
        cluster.work_in_the_ledger, "the ledger is empty", ended_s + HEALED_WITHIN_S - time.monotonic()
    )
    ledger_s = time.monotonic() - ended_s
    # Who dies between prefill and decode of a request leaves staged KV behind, which the engine frees itself.
    until_none(cluster.engines_at_work, "no engine works for nobody", HEALED_WITHIN_S + GIVEN_UP_WITHIN_S)
    blocks = sum(map(len, cluster.indexed_blocks().values()))
    print(
        f"index right {index_s:.1f} s after the kill ({blocks} blocks),"
        f" ledger empty {ledger_s:.1f} s after the load"
    )
    assert blocks > 100


@pytest.mark.parametrize(("role", "pod"), [("prefill", "prefill-p-0"), ("decode", "decode-d-1")])
async def test_an_engine_dies_and_no_request_goes_without_an_answer(
    running: Cluster, role: str, pod: str
) -> None:
    victim = f"{running.name}-{pod}"
    when = lambda: running.is_working(victim)  # noqa: E731
    aftermath = await kill_under_load(running, victim, "engine", when=when, seed=len(role))
    result = aftermath.result
    assert result.lost == 0
    assert result.completed + result.failed == result.requests
    # Only a stream that had begun may fail; one decode batch had at most so many of them.
    assert result.failed <= (0 if role == "prefill" else 16), result.failed_by_reason
    await asyncio.to_thread(heals, running, aftermath.killed_s)


async def test_a_sidecar_dies_and_no_request_notices(running: Cluster) -> None:
    victim = f"{running.name}-prefill-p-1"
    when = lambda: running.is_working(victim)  # noqa: E731
    aftermath = await kill_under_load(running, victim, "sidecar", when=when, seed=21)
    result = aftermath.result
    assert (result.lost, result.failed) == (0, 0)
    assert result.completed == result.requests
    await asyncio.to_thread(heals, running, aftermath.killed_s)


async def test_redis_dies_and_no_request_notices(running: Cluster) -> None:
    when = lambda: running.is_working(f"{running.name}-prefill-p-0")  # noqa: E731
    aftermath = await kill_under_load(running, f"{running.name}-redis-0", "redis", when=when, seed=22)
    result = aftermath.result
    assert (result.lost, result.failed) == (0, 0)
    assert result.completed == result.requests
    await asyncio.to_thread(heals, running, aftermath.killed_s)


async def test_a_scheduler_dies_and_takes_along_only_the_connections_that_it_held(running: Cluster) -> None:
    def when() -> bool:
        return under_way_at(running, running.admin_urls[1]) > 1

    aftermath = await kill_under_load(running, f"{running.name}-scheduler-1", "scheduler", when=when, seed=23)
    result = aftermath.result
    assert result.failed == 0, result.failed_by_reason
    assert result.completed + result.lost == result.requests
    # A process that is gone cannot say so. What it leaves its clients is a connection that the kernel closes
    # at once, which is as explicit as it can be: nobody waits for a time-out, and nobody else is touched.
    survivor = decided_by(running.admin_urls[0], result)
    for outcome in aftermath.ended(OutcomeKind.LOST):
        assert outcome.reason in ("cut", "no_answer")
        assert outcome.started_s <= aftermath.killed_s + 0.1
        assert 0 <= outcome.ended_s - aftermath.killed_s <= CONNECTION_DIES_WITHIN_S
        assert f"replay-{result.run}-{outcome.index}" not in survivor
    await asyncio.to_thread(heals, running, aftermath.killed_s)


def under_way_at(cluster: Cluster, admin_url: str) -> int:
    """Requests that a scheduler has admitted and not ended."""
    stats = cluster.get(f"{admin_url}/stats")
    return int(stats["admitted"] - stats["completed"] - stats["failed"] - stats["cancelled"])


def decided_by(admin_url: str, result: ReplayResult) -> set[str]:
    """Which requests of a replay a scheduler had in hand."""
    document = httpx.get(f"{admin_url}/decisions", params={"limit": 500}, trust_env=False).json()
    return {each["request_id"] for each in document["decisions"] if result.run in each["request_id"]}
