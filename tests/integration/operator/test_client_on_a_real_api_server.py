"""The client against a real API server: what the errors are, and what they say."""

from __future__ import annotations

import pytest

from mooncake_operator.kube.applier import Applier, NameTakenError
from mooncake_operator.kube.client import Client
from mooncake_operator.kube.errors import (
    AlreadyExistsError,
    FieldConflict,
    FieldConflictError,
    InvalidError,
    NotFoundError,
    PreconditionError,
)
from mooncake_operator.kube.resources import CLUSTER, CONFIG_MAP, POD, Object, owned_by


def config_map(namespace: str, name: str = "notes", **data: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": {"test": "yes"}},
        "data": data,
    }


async def test_an_apply_without_force_names_the_manager_and_the_field_it_meets(
    client: Client, namespace: str
) -> None:
    await client.apply(config_map(namespace, a="1"), manager="somebody")
    with pytest.raises(FieldConflictError) as refused:
        await client.apply(config_map(namespace, a="2"), manager="mooncake-operator")
    assert refused.value.conflicts == (FieldConflict("somebody", ".data.a"),)
    assert str(refused.value) == "somebody manages data.a"
    forced = await client.apply(config_map(namespace, a="2"), manager="mooncake-operator", force=True)
    assert forced["data"] == {"a": "2"}


async def test_a_taken_name_is_told_from_a_changed_object(client: Client, namespace: str) -> None:
    made = await client.create(config_map(namespace), manager="test")
    with pytest.raises(AlreadyExistsError):
        await client.create(config_map(namespace), manager="test")
    await client.replace({**made, "data": {"b": "1"}}, manager="test")
    with pytest.raises(PreconditionError):
        await client.replace({**made, "data": {"b": "2"}}, manager="test")


async def test_a_delete_spares_the_successor_of_the_same_name(client: Client, namespace: str) -> None:
    first = await client.create(config_map(namespace), manager="test")
    await client.delete(CONFIG_MAP, namespace, "notes", uid=first["metadata"]["uid"])
    await client.create(config_map(namespace), manager="test")
    with pytest.raises(PreconditionError):
        await client.delete(CONFIG_MAP, namespace, "notes", uid=first["metadata"]["uid"])
    assert await client.get(CONFIG_MAP, namespace, "notes")


async def test_an_apply_with_a_uid_never_writes_to_another_object(client: Client, namespace: str) -> None:
    first = await client.create(config_map(namespace), manager="test")
    await client.delete(CONFIG_MAP, namespace, "notes", uid=first["metadata"]["uid"])
    await client.create(config_map(namespace), manager="test")
    meant = config_map(namespace, a="1")
    meant["metadata"]["uid"] = first["metadata"]["uid"]
    with pytest.raises(PreconditionError):
        await client.apply(meant, manager="mooncake-operator", force=True)
    meant["metadata"]["name"] = "gone"
    with pytest.raises(PreconditionError):
        await client.apply(meant, manager="mooncake-operator", force=True)


async def test_lists_come_whole_whatever_the_page(
    client: Client, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_operator.kube.client._LARGEST_PAGE", 3)
    for number in range(8):
        await client.create(config_map(namespace, f"notes-{number}"), manager="test")
    found = await client.list_all(CONFIG_MAP, namespace, labels={"test": "yes"})
    assert [item["metadata"]["name"] for item in found] == [f"notes-{number}" for number in range(8)]
    assert {item["kind"] for item in found} == {"ConfigMap"}


async def test_what_is_listed_can_be_told_by_labels_and_fields_and_be_metadata_only(
    client: Client, namespace: str
) -> None:
    await client.create(config_map(namespace, "ours", a="1"), manager="test")
    theirs = config_map(namespace, "theirs", a="1")
    theirs["metadata"]["labels"] = {"test": "no"}
    await client.create(theirs, manager="test")
    found = await client.list_all(CONFIG_MAP, namespace, without={"test": "yes"}, metadata_only=True)
    assert "theirs" in {item["metadata"]["name"] for item in found}
    assert "ours" not in {item["metadata"]["name"] for item in found}
    assert {(item["kind"], item["apiVersion"]) for item in found} == {("ConfigMap", "v1")}
    assert not any("data" in item for item in found)
    (named,) = await client.list_all(CONFIG_MAP, namespace, fields={"metadata.name": "ours"})
    assert named["data"] == {"a": "1"}


async def test_rules_of_the_crds_come_back_as_what_to_write(client: Client, namespace: str) -> None:
    cluster = {
        "apiVersion": CLUSTER.api_version,
        "kind": "MooncakeCluster",
        "metadata": {"name": "bad", "namespace": namespace},
        "spec": {"model": {"name": "m"}, "engine": {"type": "Simulated"}, "scheduler": {"replicas": 3}},
    }
    with pytest.raises(InvalidError, match="several schedulers need to share a Redis"):
        await client.create(cluster, manager="test")


async def test_what_is_not_there_is_not_found(client: Client, namespace: str) -> None:
    with pytest.raises(NotFoundError):
        await client.get(POD, namespace, "nobody")


@pytest.fixture
async def owner(client: Client, namespace: str) -> Object:
    return await client.create(config_map(namespace, "owner"), manager="test")


async def test_nothing_is_written_where_nothing_would_change(
    client: Client, namespace: str, owner: Object
) -> None:
    applier = Applier(client)
    desired = owned_by(config_map(namespace, a="1", empty=""), owner)
    first = await applier.ensure(desired, None, owner["metadata"]["uid"])
    again = await applier.ensure(desired, first, owner["metadata"]["uid"])
    assert again is first


async def test_a_field_that_another_took_is_a_conflict_and_with_force_is_put_back(
    client: Client, namespace: str, owner: Object
) -> None:
    drifted: list[Object] = []
    applier, uid = Applier(client, on_drift=drifted.append), owner["metadata"]["uid"]
    desired = owned_by(config_map(namespace, a="1"), owner)
    await applier.ensure(desired, None, uid)
    edited = await client.patch(
        CONFIG_MAP, namespace, "notes", {"data": {"a": "9"}}, how="merge", manager="kubectl-edit"
    )
    with pytest.raises(FieldConflictError, match=r"kubectl-edit manages data\.a"):
        await applier.ensure(desired, edited, uid)
    mended = await applier.ensure(desired, edited, uid, force=True)
    assert mended["data"] == {"a": "1"}
    assert len(drifted) == 2


async def test_a_field_that_another_removed_comes_back(client: Client, namespace: str, owner: Object) -> None:
    applier, uid = Applier(client), owner["metadata"]["uid"]
    desired = owned_by(config_map(namespace, a="1", b="2"), owner)
    await applier.ensure(desired, None, uid)
    edited = await client.patch(
        CONFIG_MAP, namespace, "notes", {"data": {"b": None}}, how="merge", manager="kubectl-edit"
    )
    assert (await applier.ensure(desired, edited, uid))["data"] == {"a": "1", "b": "2"}


async def test_a_foreign_object_of_the_same_name_is_neither_adopted_nor_touched(
    client: Client, namespace: str, owner: Object
) -> None:
    foreign = await client.create(config_map(namespace, a="theirs"), manager="test")
    applier = Applier(client)
    desired = owned_by(config_map(namespace, b="ours"), owner)
    with pytest.raises(NameTakenError, match="ConfigMap notes exists and is not this cluster's"):
        await applier.ensure(desired, None, owner["metadata"]["uid"])
    assert await client.get(CONFIG_MAP, namespace, "notes") == foreign
    assert not await applier.remove(foreign, owner["metadata"]["uid"])
