"""An operator that watches reads again what it has written itself, though no event has told of it yet."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_operator.control.contract import Key
from mooncake_operator.kube.resources import CONFIG_MAP, SECRET, SERVICE, uid_of
from mooncake_testing.played_world import PlayedWorld


class Torn(Exception):
    """A pass that ended in the middle."""


@pytest.fixture
def watching(world: PlayedWorld) -> PlayedWorld:
    world.watched = True
    world.restart()
    return world


def tear(world: PlayedWorld, verb: str, plural: str) -> None:
    """Let a pass end right after the first request of a kind."""
    observe = world.client._observer

    def observer(seen_verb: str, seen_plural: str, status: int, seconds: float) -> None:
        observe(seen_verb, seen_plural, status, seconds)
        if (seen_verb, seen_plural) == (verb, plural) and status < 300:
            world.client._observer = observe
            raise Torn

    world.client._observer = observer


async def secrets(world: PlayedWorld) -> dict[str, Any]:
    found = await world.client.list_all(SECRET, world.namespace, labels={"mooncake.io/cluster": "q"})
    return {secret["metadata"]["name"]: secret.get("data") for secret in found}


async def test_a_pass_that_was_torn_after_it_made_a_secret_does_not_make_another(
    watching: PlayedWorld,
) -> None:
    await watching.apply()
    tear(watching, "patch", "secrets")
    with pytest.raises(Torn):
        await watching.reconcile()
    made = await secrets(watching)
    assert made
    await watching.reconcile()
    assert {name: data for name, data in (await secrets(watching)).items() if name in made} == made


async def test_at_rest_nothing_is_read_twice_that_nobody_changed_and_nothing_is_written(
    watching: PlayedWorld,
) -> None:
    await watching.bring_up()
    for _ in range(3):
        await watching.step()
    reads: list[tuple[str, str]] = []
    observe = watching.client._observer

    def observer(verb: str, plural: str, status: int, seconds: float) -> None:
        observe(verb, plural, status, seconds)
        reads.append((verb, plural))

    watching.client._observer = observer
    await watching.reconcile()
    watching.client._observer = observe
    assert sorted(reads) == [
        ("get", "mooncakeclusters"),
        ("list", "controllerrevisions"),
        ("list", "mooncakedecodepools"),
        ("list", "mooncakekvcachepools"),
        ("list", "mooncakeprefillpools"),
        ("list", "pods"),
    ]


async def test_what_an_event_tells_of_is_mended_in_the_next_pass(watching: PlayedWorld) -> None:
    await watching.bring_up()
    await watching.step()
    (service, *_) = await watching.client.list_all(
        SERVICE, watching.namespace, labels={"mooncake.io/cluster": "q"}
    )
    name = service["metadata"]["name"]
    await watching.client.delete(SERVICE, watching.namespace, name, uid=uid_of(service))
    key = Key(watching.namespace, watching.cluster)
    # Of another kind, which is no reason to look at Services.
    watching.reconciler.notice(key, CONFIG_MAP)
    await watching.reconcile()
    assert await watching.get("Service", name) is None
    watching.reconciler.notice(key, SERVICE)
    await watching.reconcile()
    assert await watching.get("Service", name) is not None
