"""From an object to the key of its cluster."""

from __future__ import annotations

from typing import Any

import kopf
import pytest

from mooncake_operator.control.contract import Key
from mooncake_operator.handlers import cluster_of, kopf_settings
from mooncake_operator.kube.resources import CLUSTER, POD, PREFILL_POOL, Resource
from mooncake_operator.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("resource", "body", "key"),
    [
        (CLUSTER, {"metadata": {"namespace": "ns", "name": "kimi"}}, Key("ns", "kimi")),
        (
            PREFILL_POOL,
            {"metadata": {"namespace": "ns", "name": "x"}, "spec": {"clusterRef": {"name": "kimi"}}},
            Key("ns", "kimi"),
        ),
        (
            POD,
            {"metadata": {"namespace": "ns", "name": "x", "labels": {"mooncake.io/cluster": "kimi"}}},
            Key("ns", "kimi"),
        ),
        (POD, {"metadata": {"namespace": "ns", "name": "x"}}, None),
        (PREFILL_POOL, {"metadata": {"namespace": "ns", "name": "x"}, "spec": None}, None),
        (CLUSTER, {}, None),
    ],
)
def test_every_object_leads_to_its_cluster_and_no_object_to_an_error(
    resource: Resource, body: dict[str, Any], key: Key | None
) -> None:
    assert cluster_of(resource, body) == key


def test_kopf_neither_peers_nor_watches_what_is_not_ours() -> None:
    chosen = kopf_settings(Settings())
    assert chosen.peering.standalone
    assert chosen.watching.label_selectors["pods"] == "app.kubernetes.io/managed-by=mooncake-operator"


def test_kopf_works_out_no_difference_that_nobody_asks_for() -> None:
    chosen = kopf_settings(Settings()).persistence
    body = kopf.Body({"metadata": {"annotations": {"a": "1"}}, "spec": {"replicas": 1}})
    essence = chosen.diffbase_storage.build(body=body)
    assert chosen.progress_storage.clear(essence=essence) == {}
    assert chosen.diffbase_storage.fetch(body=body) is None
    patch = kopf.Patch()
    chosen.diffbase_storage.store(body=body, patch=patch, essence=essence)
    chosen.progress_storage.touch(body=body, patch=patch, value="now")
    assert not patch


def test_settings_come_from_the_environment() -> None:
    environment = {"MOONCAKE_OPERATOR_NAMESPACES": "a,b", "MOONCAKE_OPERATOR_WORKERS": "2", "HOME": "/"}
    settings = Settings.from_environment(environment)
    assert settings.namespaces == ("a", "b")
    assert settings.workers == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("WORKERS", "many", "WORKERS"), ("LOG_LEVEL", "LOUD", "DEBUG"), ("PORT", "1", "known are")],
)
def test_a_setting_that_cannot_be_used_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings.from_environment({f"MOONCAKE_OPERATOR_{name}": value})
