"""Revisions of specs: what is one, and what going back to one means."""

from typing import Any

import pytest
from hypothesis import given, settings

from mooncake_core.api import parse_object
from mooncake_operator.planning.spec_revisions import essential, identity, undone
from mooncake_testing.clusters import cluster_manifests
from mooncakectl.rollout.history import differences


def numbers_changed(spec: dict[str, Any]) -> dict[str, Any]:
    """The same wish, with other numbers of instances."""
    fields = ("prefillPools", "decodePools", "kvCachePools")
    changed = {
        field: [{**entry, "replicas": entry["replicas"] + 1} for entry in spec[field]]
        for field in fields
        if field in spec
    }
    return {**spec, **changed}


@settings(max_examples=60, deadline=None)
@given(cluster_manifests())
def test_other_numbers_are_no_other_revision_and_an_undo_to_oneself_changes_nothing(manifest):
    cluster = parse_object(manifest)
    more = parse_object({**manifest, "spec": numbers_changed(manifest["spec"])})
    assert identity(cluster.spec) == identity(more.spec)
    whole = cluster.spec.manifest()
    assert list(differences(whole, undone(whole, whole))) == []


@settings(max_examples=60, deadline=None)
@given(cluster_manifests(), cluster_manifests())
def test_an_undo_brings_back_all_but_the_numbers_whatever_was_there_since(then, now):
    then_spec, now_spec = (parse_object(manifest).spec.manifest() for manifest in (then, now))
    back = undone(now_spec, then_spec)
    assert essential(back) == essential(then_spec)
    assert back.get("coordination") == now_spec.get("coordination")
    present = {entry["name"]: entry["replicas"] for entry in now_spec["decodePools"]}
    for entry in back["decodePools"]:
        kept = next(e["replicas"] for e in then_spec["decodePools"] if e["name"] == entry["name"])
        assert entry["replicas"] == present.get(entry["name"], kept)


@pytest.mark.parametrize(
    ("before", "after", "paths"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}, ["a.b", "a.c"]),
        ({"p": [{"name": "x", "n": 1}]}, {"p": [{"name": "x", "n": 2}, {"name": "y"}]}, ["p[x].n", "p[y]"]),
        ({"p": [{"name": "x"}, {"name": "y"}]}, {"p": [{"name": "y"}, {"name": "x"}]}, []),
        ({"args": ["a"]}, {"args": ["b"]}, ["args"]),
    ],
)
def test_differences_are_told_as_paths(before, after, paths):
    assert list(differences(before, after)) == paths
