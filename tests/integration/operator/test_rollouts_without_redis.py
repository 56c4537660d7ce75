"""Schedulers without Redis read the instances from a file; during a rollout it must tell old from new."""

from __future__ import annotations

import json
from typing import Any

from mooncake_testing.played_world import PlayedWorld


def alone(spec: Any) -> None:
    """One scheduler, all in its memory."""
    spec["scheduler"] = {"replicas": 1}


def alone_with_new_engines(spec: Any) -> None:
    alone(spec)
    spec["engine"]["args"] = ["--max-num-seqs=7"]


async def told(world: PlayedWorld) -> dict[str, str]:
    """What the file says: revisions by instance."""
    found = await world.get("ConfigMap", f"{world.cluster}-scheduler")
    assert found is not None
    instances = json.loads(found["data"]["instances.json"])
    return {each["id"]: each["revision"] for each in instances if each["role"] in ("prefill", "decode")}


async def there(world: PlayedWorld) -> dict[str, str]:
    """What runs: revisions by Pod."""
    pods = {**await world.nodes.pods("prefill"), **await world.nodes.pods("decode")}
    return {
        name: pod["metadata"]["labels"]["mooncake.io/pairing"]
        for name, pod in pods.items()
        if "deletionTimestamp" not in pod["metadata"]
    }


async def test_a_scheduler_without_redis_is_told_the_revision_that_each_instance_was_made_from(
    world: PlayedWorld,
) -> None:
    await world.bring_up(alone)
    (old,) = set((await there(world)).values())
    assert await told(world) == await there(world)

    await world.apply(alone_with_new_engines)
    mixtures = 0

    async def is_over() -> bool:
        nonlocal mixtures
        running = await there(world)
        await world.reconcile()
        if await there(world) == running:
            said = await told(world)
            assert {name: said.get(name) for name in running} == running
            mixtures += len(set(running.values())) == 2
        return old not in running.values() and await world.is_ready()

    await world.until(is_over, "all instances are new", steps=120)
    assert mixtures, "old and new ones were never there together"
