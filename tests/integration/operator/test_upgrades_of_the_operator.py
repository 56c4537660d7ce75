"""Another version of the operator renders Pods in another way, and replaces none for that."""

from __future__ import annotations

from typing import Any

from mooncake_operator.settings import Settings
from mooncake_testing.played_world import PlayedWorld

LATER = "mooncake-k8s:99.0.0"


def with_one_more_argument(spec: dict[str, Any]) -> None:
    spec["engine"]["args"] = ["--max-num-seqs", "64"]


async def images(world: PlayedWorld) -> dict[str, str]:
    """The engine's image of each instance."""
    pods = {**await world.nodes.pods("prefill"), **await world.nodes.pods("decode")}
    return {
        name: container["image"]
        for name, pod in pods.items()
        for container in pod["spec"]["containers"]
        if container["name"] == "engine"
    }


async def test_engines_are_replaced_when_their_user_wishes_and_not_when_the_operator_is_upgraded(
    world: PlayedWorld,
) -> None:
    await world.bring_up()
    before = await images(world)
    uids = {**await world.uids("prefill"), **await world.uids("decode")}
    assert LATER not in before.values()

    world.settings = Settings(image=LATER)
    world.restart()
    for _ in range(5):
        await world.step()
    assert {**await world.uids("prefill"), **await world.uids("decode")} == uids
    assert await world.is_ready()

    # What is added to a running revision is made as the others were.
    wanted = len(await world.uids("decode")) + 1
    await world.scale(wanted)

    async def scaled() -> bool:
        return len(await world.routable("decode")) == wanted

    await world.until(scaled, "one instance more")
    assert set((await images(world)).values()) == set(before.values())

    await world.apply(with_one_more_argument)

    async def replaced() -> bool:
        return set((await images(world)).values()) == {LATER} and await world.is_ready()

    await world.until(replaced, "the user's change brings along what is new", steps=200)
