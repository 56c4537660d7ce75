"""Events: once, where `kubectl describe` shows them, and never too many."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.events import EventRecorder
from mooncake_operator.kube.resources import CONFIG_MAP, EVENT, Object, uid_of


class Told:
    """A recorder on a clock of its own, and an object to tell of."""

    def __init__(self, client: Client, about: Object) -> None:
        self.client = client
        self.about = about
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.results: Counter[str] = Counter()
        self.recorder = EventRecorder(
            client,
            instance="test",
            now=lambda: self.now,
            observe=lambda result: self.results.update([result]),
        )

    async def record(self, note: str, reason: str = "Broken") -> None:
        await self.recorder.record(self.about, reason, note, kind="Warning")

    async def notes(self) -> list[str]:
        namespace = self.about["metadata"]["namespace"]
        fields = {"regarding.uid": uid_of(self.about)}
        return sorted(e["note"] for e in await self.client.list_all(EVENT, namespace, fields=fields))


@pytest.fixture
async def told(client: Client, namespace: str) -> Told:
    about = await client.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": namespace}},
        manager="test",
    )
    return Told(client, {"apiVersion": "v1", "kind": CONFIG_MAP.kind, **about})


async def test_the_same_event_comes_once_in_ten_minutes(told: Told) -> None:
    for _ in range(5):
        await told.record("no Secret keys")
    assert await told.notes() == ["no Secret keys"]
    told.now += timedelta(minutes=11)
    await told.record("no Secret keys")
    assert await told.notes() == ["no Secret keys"] * 2


async def test_an_object_gets_25_at_once_and_then_one_in_five_minutes(told: Told) -> None:
    for number in range(60):
        await told.record(f"Pod {number}")
    assert len(await told.notes()) == 25
    assert told.results == {"posted": 25, "dropped": 35}
    told.now += timedelta(minutes=5, seconds=1)
    await told.record("Pod 60")
    await told.record("Pod 61")
    assert len(await told.notes()) == 26


async def test_a_long_note_is_cut_to_what_the_api_server_takes(told: Told) -> None:
    await told.record("×" * 5000)
    (note,) = await told.notes()
    assert (len(note.encode()), note[-2:]) == (1023, "×…")


async def test_an_event_that_cannot_be_posted_disturbs_nobody(told: Told) -> None:
    await told.record("of a reason that is no word", reason="x" * 500)
    assert told.results == {"failed": 1}
