"""`mooncakectl rollout` against a real API server: what somebody types, and what comes of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_operator.kube.resources import CLUSTER, CONTROLLER_REVISION, PREFILL_POOL, Object
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_world import PlayedWorld

# Each command is a process of its own.
pytestmark = pytest.mark.timeout(300)


class Terminal:
    """Types `mooncakectl rollout …`."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._where = ["--kubeconfig", str(server.kubeconfig), "-n", namespace]

    async def types(self, *words: str) -> tuple[int, str, str]:
        """Exit code, answer and errors."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mooncakectl", "rollout", *words, *self._where),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        answer, errors = await process.communicate()
        assert process.returncode is not None
        return process.returncode, answer.decode(), errors.decode()

    async def asks(self, *words: str) -> Any:
        code, answer, errors = await self.types(*words, "--json")
        assert code == 0, errors
        return json.loads(answer)

    async def is_refused(self, *words: str) -> str:
        code, _, errors = await self.types(*words)
        assert code == 1
        assert errors.startswith("error: ")
        assert "Traceback" not in errors
        return errors


@pytest.fixture
def terminal(api_server: ApiServer, namespace: str) -> Terminal:
    return Terminal(api_server, namespace)


def time_scale(number: int, decode: int = 2) -> Callable[[Any], None]:
    def change(spec: Any) -> None:
        spec["engine"]["simulated"]["timeScale"] = number
        spec["decodePools"][0]["replicas"] = decode

    return change


async def spec_of(world: PlayedWorld) -> Any:
    return (await world.client.get(CLUSTER, world.namespace, "q"))["spec"]


async def roll(world: PlayedWorld, number: int) -> None:
    await world.apply(time_scale(number))
    await world.reconcile()

    async def is_over() -> bool:
        found = {
            pod["metadata"]["labels"]["mooncake.io/pairing"]
            for role in ("prefill", "decode")
            for pod in (await world.nodes.pods(role)).values()
        }
        return len(found) == 1 and await world.is_ready()

    await world.until(is_over, "the rollout is over", 120)


async def test_the_history_says_what_each_revision_changed_and_scaling_is_none(
    world: PlayedWorld, terminal: Terminal
) -> None:
    await world.apply()
    await world.reconcile()
    await world.scale(5)
    await world.apply(time_scale(10, decode=3))
    await world.reconcile()
    live = await world.client.get(CLUSTER, world.namespace, "q")
    cause = {"metadata": {"annotations": {"kubernetes.io/change-cause": "faster <engines> & more"}}}
    await world.client.patch(CLUSTER, world.namespace, "q", cause, how="merge", manager="kubectl")
    await world.apply(time_scale(20, decode=3))
    await world.reconcile()
    await world.reconcile()
    found = (await terminal.asks("history", "cluster/q"))["revisions"]
    assert [record["revision"] for record in found] == [1, 2]
    assert found[1]["changes"] == ["engine.simulated.timeScale"]
    assert found[1]["cause"] == "faster <engines> & more"
    assert [record["present"] for record in found] == [False, True]
    first = await terminal.asks("history", "q", "--revision", "1")
    assert first["spec"]["engine"] == live["spec"]["engine"]
    code, table, _ = await terminal.types("history", "mkc/q")
    assert code == 0
    assert "REVISION" in table
    assert "engine.simulated.timeScale" in table
    assert "2 (present)" in table
    code, text, _ = await terminal.types("history", "cluster/q", "--revision", "2")
    assert "timeScale: 20" in text


async def test_an_undo_brings_the_old_pods_back_and_leaves_the_number_of_instances(
    world: PlayedWorld, terminal: Terminal
) -> None:
    await world.bring_up()
    before = {
        p["metadata"]["labels"]["mooncake.io/revision"] for p in (await world.nodes.pods("decode")).values()
    }
    await roll(world, 20)
    await world.scale(3)
    await world.apply(time_scale(20, decode=2))
    told = await terminal.asks("undo", "cluster/q")
    assert told == {"revision": 1, "changes": ["engine.simulated.timeScale"]}
    assert (await spec_of(world))["engine"]["simulated"]["timeScale"] == 10

    async def is_back() -> bool:
        pods = (await world.nodes.pods("decode")).values()
        now = {pod["metadata"]["labels"]["mooncake.io/revision"] for pod in pods}
        return now == before and len(pods) == 3 and await world.is_ready()

    await world.until(is_back, "three instances of the first revision", 120)
    found = (await terminal.asks("history", "cluster/q"))["revisions"]
    assert [(record["revision"], record["present"]) for record in found] == [(2, False), (3, True)]
    assert await terminal.asks("undo", "cluster/q", "--to-revision", "3") == {"revision": 3, "changes": []}
    assert (await terminal.asks("undo", "cluster/q", "--to-revision", "2"))["revision"] == 2


async def test_an_undo_brings_a_removed_pool_back_with_the_number_it_had(
    world: PlayedWorld, terminal: Terminal
) -> None:
    await world.apply(time_scale(10, decode=3))
    await world.reconcile()

    def without_store(spec: Any) -> None:
        time_scale(10, decode=4)(spec)
        del spec["kvCachePools"]
        spec["prefillPools"].append({"name": "more", "replicas": 1})

    await world.apply(without_store)
    await world.reconcile()
    await terminal.asks("undo", "q")
    spec = await spec_of(world)
    assert [pool["name"] for pool in spec["kvCachePools"]] == ["kv"]
    assert [pool["name"] for pool in spec["prefillPools"]] == ["prefill"]
    assert spec["decodePools"][0]["replicas"] == 4, "the number of today"


async def test_pause_holds_a_rollout_in_the_middle_and_resume_lets_it_end(
    world: PlayedWorld, terminal: Terminal
) -> None:
    await world.bring_up()
    await world.apply(time_scale(20))
    for _ in range(4):
        await world.step()
    assert (await terminal.asks("pause", "cluster/q"))["paused"] == ["q-prefill", "q-decode"]
    code, answer, _ = await terminal.types("pause", "cluster/q")
    assert (code, answer) == (0, "nothing to do: already paused\n")
    for _ in range(3):
        await world.step()
    held = await world.uids("prefill") | await world.uids("decode")
    for _ in range(5):
        await world.step()
    assert await world.uids("prefill") | await world.uids("decode") == held
    told = await terminal.asks("status", "cluster/q", "--no-watch")
    assert not told["done"]
    assert any("Paused" in pool["message"] for pool in told["pools"])
    assert (await terminal.asks("resume", "cluster/q"))["resumed"] == ["q-prefill", "q-decode"]
    waiting = asyncio.create_task(terminal.types("status", "cluster/q", "--timeout", "120"))
    while not waiting.done():
        await world.step()
        await asyncio.sleep(0.05)
    code, answer, errors = await waiting
    assert code == 0, errors
    assert "q-decode: rolled out" in answer
    assert (await terminal.asks("status", "cluster/q"))["done"]


async def test_status_ends_with_an_error_when_the_deadline_is_over(
    world: PlayedWorld, terminal: Terminal
) -> None:
    await world.bring_up()
    world.nodes.trouble = lambda pod: {"phase": "Pending", "conditions": []}
    await world.apply(time_scale(20))
    for _ in range(3):
        await world.step()
    assert "not over within 1 s: " in await terminal.is_refused("status", "cluster/q", "--timeout", "1")
    world.passed_s = 2000
    await world.step()
    assert "no progress within" in await terminal.is_refused("status", "cluster/q")


async def test_a_pool_of_its_own_has_its_own_history_and_an_entry_has_its_clusters(
    world: PlayedWorld, terminal: Terminal
) -> None:
    await world.apply()
    pool: Object = {
        "apiVersion": PREFILL_POOL.api_version,
        "kind": "MooncakePrefillPool",
        "metadata": {"name": "extra", "namespace": world.namespace},
        "spec": {"clusterRef": {"name": "q"}, "replicas": 1},
    }
    await world.client.apply(pool, manager="kubectl")
    await world.reconcile()
    pool["spec"]["podTemplate"] = {"metadata": {"labels": {"team": "llm"}}}
    pool["spec"]["replicas"] = 4
    await world.client.apply(pool, manager="kubectl")
    await world.reconcile()
    told = await terminal.asks("undo", "prefillpool/extra")
    assert told == {"revision": 1, "changes": ["podTemplate"]}
    live = await world.client.get(PREFILL_POOL, world.namespace, "extra")
    assert "podTemplate" not in live["spec"]
    assert live["spec"]["replicas"] == 4
    assert (await terminal.asks("pause", "mkpp/extra"))["paused"] == ["extra"]
    assert (await terminal.asks("pause", "cluster/q"))["paused"] == ["q-prefill", "q-decode"]
    refused = await terminal.is_refused("undo", "prefillpool/q-prefill")
    assert "write mooncakectl rollout undo cluster/q" in refused


async def test_what_cannot_be_done_says_what_to_type_instead(world: PlayedWorld, terminal: Terminal) -> None:
    assert "there is no MooncakeCluster q in namespace" in await terminal.is_refused("history", "cluster/q")
    assert "write cluster/NAME" in await terminal.is_refused("undo", "deployment/q")
    await world.apply()
    assert "is one running?" in await terminal.is_refused("history", "cluster/q")
    await world.reconcile()
    assert "the only revision on record is 1" in await terminal.is_refused("undo", "cluster/q")
    assert "there is no revision 7; on record are 1" in await terminal.is_refused(
        "undo", "cluster/q", "--to-revision", "7"
    )
    assert "write mooncakectl rollout pause cluster/q" in await terminal.is_refused("pause", "mkkv/q-kv")


async def test_of_many_edits_the_last_ten_are_kept_beside_the_present_one(world: PlayedWorld) -> None:
    for number in range(1, 15):
        await world.apply(time_scale(number))
        await world.reconcile()
    await world.reconcile()
    found = await world.client.list_all(CONTROLLER_REVISION, world.namespace)
    numbers = sorted(r["revision"] for r in found if "mooncake.io/spec-revision" in r["metadata"]["labels"])
    assert numbers == list(range(4, 15))
    await world.reconcile()
    assert ("post", "controllerrevisions") not in world.writes
