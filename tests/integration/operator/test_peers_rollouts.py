"""What other operators' rollouts did to their users (docs/peers-problems.md), and what must happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mooncake_operator.kube.resources import Object
from mooncake_testing.played_world import PlayedWorld

IMAGE_MISSING = {
    "phase": "Pending",
    "containerStatuses": [
        {
            "name": "engine",
            "ready": False,
            "restartCount": 0,
            "image": "none",
            "imageID": "",
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found: engine:2"}},
        }
    ],
}
GATED = {
    "phase": "Pending",
    "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "kueue"}
    ],
}


def time_scale(number: int) -> Callable[[Any], None]:
    """An edit that makes a new revision of every engine pool."""

    def change(spec: Any) -> None:
        spec["engine"]["simulated"]["timeScale"] = number

    return change


def of_other_revisions(known: set[str], status: Object) -> Callable[[Object], Object | None]:
    """Trouble for engine Pods of all revisions but those known."""

    def trouble(pod: Object) -> Object | None:
        labels = pod["metadata"]["labels"]
        new = labels.get("mooncake.io/role") in ("prefill", "decode") and revision(pod) not in known
        return status if new else None

    return trouble


def revision(pod: Object) -> str:
    found: str = pod["metadata"]["labels"]["mooncake.io/revision"]
    return found


async def revisions(world: PlayedWorld, role: str) -> set[str]:
    return {revision(pod) for pod in (await world.nodes.pods(role)).values()}


async def known_revisions(world: PlayedWorld) -> set[str]:
    return await revisions(world, "prefill") | await revisions(world, "decode")


async def least_routable(world: PlayedWorld, steps: int) -> dict[str, int]:
    """The fewest routable instances of each role that any of so many passes left."""
    least = {"prefill": 99, "decode": 99}
    for _ in range(steps):
        await world.step()
        for role in least:
            least[role] = min(least[role], len(await world.routable(role)))
    return least


async def test_old_pods_that_still_count_do_not_make_a_new_image_available(world: PlayedWorld) -> None:
    await world.bring_up()
    world.nodes.trouble = of_other_revisions(await known_revisions(world), IMAGE_MISSING)
    await world.apply(time_scale(20))
    for _ in range(6):
        await world.step()
    assert len(await world.routable("decode")) == 2, "what serves is kept"
    pool = await world.get("MooncakeDecodePool", "q-decode")
    assert pool is not None
    available = await world.condition("Available", "MooncakeDecodePool", "q-decode")
    assert (available["status"], available["reason"]) == ("False", "ImageUnavailable")
    assert available["observedGeneration"] == pool["metadata"]["generation"]
    assert "not found: engine:2" in available["message"]
    assert not await world.is_ready()


async def test_a_revert_in_the_middle_of_a_rollout_keeps_every_instance_that_serves(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    old = await known_revisions(world)
    before = await world.uids("decode")
    await world.apply(time_scale(20))
    for _ in range(4):
        await world.step()
    assert await known_revisions(world) > old, "the rollout is on its way"
    await world.apply(time_scale(10))
    least = await least_routable(world, 25)

    async def is_as_before() -> bool:
        return await world.is_ready() and await known_revisions(world) == old

    await world.until(is_as_before, "the cluster is as it was")
    assert least == {"prefill": 2, "decode": 2}
    assert len(before.items() & (await world.uids("decode")).items()) >= 1, "who serves is not made anew"


async def test_three_quick_edits_leave_every_pool_what_it_needs(world: PlayedWorld) -> None:
    await world.bring_up()
    old = await known_revisions(world)
    for number in (20, 30, 40):
        await world.apply(time_scale(number))
        await world.step()
    least = await least_routable(world, 40)

    async def is_over() -> bool:
        kinds = [len(await revisions(world, role)) for role in ("prefill", "decode")]
        return await world.is_ready() and kinds == [1, 1] and not await known_revisions(world) & old

    await world.until(is_over, "the last edit has won")
    assert least == {"prefill": 2, "decode": 2}


async def test_an_old_instance_stays_until_the_schedulers_know_the_new_one(world: PlayedWorld) -> None:
    await world.bring_up()
    old = await known_revisions(world)
    before = await world.uids("prefill") | await world.uids("decode")
    world.nodes.registers = lambda pod: revision(pod) in old
    await world.apply(time_scale(20))
    for _ in range(10):
        await world.step()
    present = await world.uids("prefill") | await world.uids("decode")
    assert before.items() <= present.items(), "containers that are ready are not routable yet"
    assert len(present) > len(before)
    world.nodes.registers = lambda pod: True

    async def is_over() -> bool:
        return await world.is_ready() and not await known_revisions(world) & old

    await world.until(is_over, "they are known", 100)


async def test_a_rollout_does_not_stall_when_every_old_instance_is_broken_already(world: PlayedWorld) -> None:
    await world.apply()
    await world.nodes.add_scheduler("q")
    await world.reconcile()
    world.nodes.trouble = of_other_revisions(set(), IMAGE_MISSING)
    for _ in range(3):
        await world.step()
    broken = await known_revisions(world)
    assert await world.routable("decode") == []
    world.nodes.trouble = lambda pod: IMAGE_MISSING if revision(pod) in broken else None

    def mend(spec: Any) -> None:
        time_scale(20)(spec)
        for pools in ("prefillPools", "decodePools"):
            spec[pools][0]["update"] = {"maxSurge": 1, "maxUnavailable": 1}

    await world.apply(mend)

    async def is_over() -> bool:
        serving = [len(await world.routable(role)) for role in ("prefill", "decode")]
        return serving == [2, 2] and not await known_revisions(world) & broken

    await world.until(is_over, "the mended revision serves")


async def test_surge_pods_that_a_queue_gates_end_a_rollout_with_its_deadline_and_a_reason(
    world: PlayedWorld,
) -> None:
    def no_dip(number: int) -> Callable[[Any], None]:
        def change(spec: Any) -> None:
            time_scale(number)(spec)
            spec["coordination"] = {"rollout": {"progressDeadlineSeconds": 600}}
            for pools in ("prefillPools", "decodePools"):
                spec[pools][0]["update"] = {"maxSurge": 1, "maxUnavailable": 0}

        return change

    await world.bring_up(no_dip(10))
    world.nodes.trouble = of_other_revisions(await known_revisions(world), GATED)
    await world.apply(no_dip(20))
    for _ in range(5):
        await world.step()
    assert (await world.condition("Progressing", "MooncakeDecodePool", "q-decode"))["status"] == "True"
    world.passed_s = 700
    await world.step()
    progressing = await world.condition("Progressing", "MooncakeDecodePool", "q-decode")
    assert (progressing["status"], progressing["reason"]) == ("False", "DeadlineExceeded")
    assert [len(await world.routable(role)) for role in ("prefill", "decode")] == [2, 2]


async def test_surge_pods_that_a_queue_gates_give_way_to_down_first_where_that_is_allowed(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    old = await known_revisions(world)

    def queue(pod: Object) -> Object | None:
        return GATED if engines > 4 and revision(pod) not in old else None

    engines = 4
    world.nodes.trouble = queue
    await world.apply(time_scale(20))

    async def is_over() -> bool:
        nonlocal engines
        engines = len(await world.pods("prefill")) + len(await world.pods("decode"))
        world.passed_s += 10
        return await world.is_ready() and not await known_revisions(world) & old

    await world.until(is_over, "the quota of four instances is enough", 150)


async def test_a_change_of_one_pools_template_leaves_the_other_pools_pods_alone(world: PlayedWorld) -> None:
    await world.bring_up()
    prefill, decode, store = [await world.uids(role) for role in ("prefill", "decode", "redis")]

    def relabel(spec: Any) -> None:
        spec["prefillPools"][0]["podTemplate"] = {"metadata": {"labels": {"team": "llm"}}}

    await world.apply(relabel)

    async def is_over() -> bool:
        return await world.is_ready() and not prefill.items() & (await world.uids("prefill")).items()

    await world.until(is_over, "prefill is new", 100)
    assert await world.uids("decode") == decode
    assert await world.uids("redis") == store


async def test_growing_one_role_by_the_gpus_of_another_waits_until_they_are_free(world: PlayedWorld) -> None:
    def with_gpus(prefill: int, decode: int) -> Callable[[Any], None]:
        def change(spec: Any) -> None:
            for pools, replicas in (("prefillPools", prefill), ("decodePools", decode)):
                spec[pools][0] |= {"replicas": replicas, "resources": {"gpu": {"count": 1}}}
            spec["coordination"] = {"gpuBudget": 4}

        return change

    await world.bring_up(with_gpus(2, 2))
    for name in ("q-decode-d-0", "q-decode-d-1"):
        world.scheduler.instances[name]["in_flight"] = 3
    await world.apply(with_gpus(3, 1))
    most = 0
    for turn in range(12):
        if turn == 6:
            assert len(await world.pods("prefill")) == 2, "the GPU is still held by work in flight"
            for instance in world.scheduler.instances.values():
                instance["in_flight"] = 0
        await world.step()
        most = max(most, len(await world.pods("prefill")) + len(await world.pods("decode")))
    assert most == 4

    async def is_over() -> bool:
        return [len(await world.pods(role)) for role in ("prefill", "decode")] == [3, 1]

    await world.until(is_over, "both have their share")
