"""The API server refuses what `mooncakectl validate` refuses, and says which field and what to write."""

from __future__ import annotations

import pytest

from mooncake_testing.apiserver import ApiServer, refusal
from mooncake_testing.wrong_manifests import Wrong, cluster, pool, wrong_manifests

WRONG = list(wrong_manifests())


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.by_server], ids=lambda wrong: wrong.name)
def test_it_is_refused_with_the_field_and_what_to_write(
    wrong: Wrong, api_server: ApiServer, namespace: str
) -> None:
    said = refusal(api_server, namespace, wrong.manifest)
    assert wrong.field in said
    assert (wrong.server_words or wrong.words) in said


def test_without_the_mistakes_it_is_taken(api_server: ApiServer, namespace: str) -> None:
    assert refusal(api_server, namespace, cluster()) == ""
    assert refusal(api_server, namespace, pool()) == ""


@pytest.mark.parametrize("wrong", [w for w in WRONG if not w.by_server], ids=lambda wrong: wrong.name)
def test_what_hides_in_a_pod_template_passes_and_is_the_operators_to_refuse(
    wrong: Wrong, api_server: ApiServer, namespace: str
) -> None:
    assert refusal(api_server, namespace, wrong.manifest) == ""


def test_a_pool_stays_with_its_cluster(api_server: ApiServer, namespace: str) -> None:
    path = f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}/mooncakedecodepools"
    live = api_server.request("POST", path, pool())
    moved = {**live, "spec": {**live["spec"], "clusterRef": {"name": "other"}}}
    said = refusal(api_server, namespace, moved, "PUT")
    assert "spec.clusterRef" in said
    assert "cannot be changed; make a new pool" in said
