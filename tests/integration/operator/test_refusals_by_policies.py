"""What a policy forbids is told, holds nothing else up, and is done once it may be."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.error
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mooncake_operator.kube.client import Client
from mooncake_operator.kube.resources import EVENT, Object
from mooncake_testing.apiserver import ApiServer
from mooncake_testing.played_world import PlayedWorld

DECODE = ("MooncakeDecodePool", "q-decode")
_POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
_PATIENCE_S = 60.0


@pytest.fixture
def forbids(api_server: ApiServer, namespace: str) -> Any:
    """A policy that forbids one verb on one kind in the test's namespace, while the context lasts."""

    @contextlib.asynccontextmanager
    async def forbidding(verb: str, group: str, plural: str, probe: Object) -> AsyncIterator[None]:
        name = f"no-{verb.lower()}-{plural}-{namespace}"
        where = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        rule = {"apiGroups": [group], "apiVersions": ["*"], "operations": [verb], "resources": [plural]}
        policy = {
            "matchConstraints": {"namespaceSelector": where, "resourceRules": [rule]},
            "validations": [{"expression": "false", "message": "not on a Friday"}],
        }
        binding = {"policyName": name, "validationActions": ["Deny"]}
        for path, kind, spec in (
            (_POLICIES, "ValidatingAdmissionPolicy", policy),
            (f"{_POLICIES.removesuffix('ies')}ybindings", "ValidatingAdmissionPolicyBinding", binding),
        ):
            body = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
            api_server.request("POST", path, {**body, "spec": spec})
        await _until(lambda: _is_refused(api_server, verb, probe))
        try:
            yield
        finally:
            api_server.request("DELETE", f"{_POLICIES.removesuffix('ies')}ybindings/{name}")
            api_server.request("DELETE", f"{_POLICIES}/{name}")
            await _until(lambda: not _is_refused(api_server, verb, probe))

    return forbidding


def _is_refused(api_server: ApiServer, verb: str, probe: Object) -> bool:
    """Whether the policy is in force, asked by what changes nothing."""
    how = {"CREATE": "POST", "DELETE": "DELETE", "UPDATE": "PATCH"}[verb]
    try:
        api_server.request(how, f"{probe['path']}?dryRun=All", probe.get("body"))
    except urllib.error.HTTPError as error:
        return "not on a Friday" in error.read().decode()
    return False


async def _until(holds: Any) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.2)


def _pod(namespace: str, name: str) -> Object:
    return {"path": f"/api/v1/namespaces/{namespace}/pods/{name}"}


async def test_a_pod_that_may_not_be_deleted_is_told_of_and_holds_nothing_else_up(
    world: PlayedWorld, client: Client, namespace: str, forbids: Any
) -> None:
    await world.bring_up()
    async with forbids("DELETE", "", "pods", _pod(namespace, "q-decode-d-1")):
        await world.nodes.set_status("q-decode-d-0", {"phase": "Failed", "reason": "Evicted"})
        world.scheduler.instances.pop("q-decode-d-0")

        async def is_told() -> bool:
            return (await world.condition("Degraded", *DECODE)).get("status") == "True"

        await world.until(is_told, "the pool says what is refused", 20)
        degraded = await world.condition("Degraded", *DECODE)
        assert degraded["reason"] == "AdmissionRefused"
        assert degraded["message"].startswith("deleting Pod q-decode-d-0: ")
        assert "not on a Friday" in degraded["message"]

        # The pool that has the Pod, and others, go on.
        def more(spec: Any) -> None:
            spec["decodePools"][0]["replicas"] = 3
            spec["prefillPools"][0]["replicas"] = 3

        await world.apply(more)

        async def have_grown() -> bool:
            made = {"q-decode-d-2", "q-prefill-p-2"}
            return made <= {*await world.routable("prefill"), *await world.routable("decode")}

        await world.until(have_grown, "both pools have grown", 20)
        # Nobody tries in a loop.
        result = await world.step()
        assert result.requeue_after_s is not None
        assert result.requeue_after_s >= 1
    await world.until(world.is_ready, "the Pod has gone, and come back", 20)
    assert (await world.condition("Degraded", *DECODE))["status"] == "False"
    events = await client.list_all(EVENT, namespace)
    said = {event["note"].split(":")[0] for event in events if event["reason"] == "AdmissionRefused"}
    assert "deleting Pod q-decode-d-0" in said


async def test_a_revision_that_may_not_be_kept_is_told_of_and_what_serves_stays(
    world: PlayedWorld, namespace: str, forbids: Any
) -> None:
    await world.bring_up()
    before = await world.uids("decode")
    path = f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"
    kept = {"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": "probe"}}
    probe = {"path": path, "body": {**kept, "data": {}, "revision": 1}}

    def edit(spec: Any) -> None:
        spec["engine"]["args"] = ["--max-num-seqs=17"]

    async with forbids("CREATE", "apps", "controllerrevisions", probe):
        await world.apply(edit)
        await world.step()
        await world.step()
        degraded = await world.condition("Degraded", *DECODE)
        assert degraded["reason"] == "AdmissionRefused"
        assert "ControllerRevision q-decode-" in degraded["message"]
        assert await world.uids("decode") == before

    async def is_replaced() -> bool:
        return await world.is_ready() and before.items().isdisjoint((await world.uids("decode")).items())

    await world.until(is_replaced, "the rollout has come through")


async def test_an_object_that_may_not_be_pruned_is_told_of_and_holds_nothing_up(
    world: PlayedWorld, namespace: str, forbids: Any
) -> None:
    def two(spec: Any) -> None:
        spec["decodePools"].append({**spec["decodePools"][0], "name": "more"})

    def grown(spec: Any) -> None:
        spec["prefillPools"][0]["replicas"] = 3

    await world.bring_up(two)
    probe = {"path": f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}/mooncakedecodepools/q-more"}
    async with forbids("DELETE", "mooncake.io", "mooncakedecodepools", probe):
        await world.apply(grown)

        async def has_grown() -> bool:
            return len(await world.routable("prefill")) == 3

        await world.until(has_grown, "the other pool has grown", 20)
        ready = await world.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "AdmissionRefused")
        assert ready["message"].startswith("deleting MooncakeDecodePool q-more: ")

    async def is_gone() -> bool:
        return await world.is_ready() and await world.get("MooncakeDecodePool", "q-more") is None

    await world.until(is_gone, "the pool has gone")
