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
from mooncake_operator.kube.resources import (
    CLUSTER,
    CONTROLLER_REVISION,
    DECODE_POOL,
    EVENT,
    SECRET,
    Object,
    name_of,
    uid_of,
)
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
    method = {"CREATE": "POST", "DELETE": "DELETE", "UPDATE": "PATCH"}[verb]
    how = "application/merge-patch+json" if method == "PATCH" else "application/json"
    try:
        api_server.request(method, f"{probe['path']}?dryRun=All", probe.get("body"), how)
    except urllib.error.HTTPError as error:
        with error:
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
    await world.until(world.is_ready, "the Pod has gone, and come back", 20)
    assert (await world.condition("Degraded", *DECODE))["status"] == "False"
    events = await client.list_all(EVENT, namespace)
    said = {event["note"].split(":")[0] for event in events if event["reason"] == "AdmissionRefused"}
    assert "deleting Pod q-decode-d-0" in said


async def test_a_drained_instance_that_may_not_be_deleted_is_tried_as_seldom_as_all_that_is_refused(
    world: PlayedWorld, namespace: str, forbids: Any
) -> None:
    def fewer(spec: Any) -> None:
        spec["decodePools"][0]["replicas"] = 1

    await world.bring_up()
    async with forbids("DELETE", "", "pods", _pod(namespace, "q-decode-d-1")):
        await world.apply(fewer)

        async def is_told() -> bool:
            return (await world.condition("Degraded", *DECODE)).get("status") == "True"

        await world.until(is_told, "the pool says what is refused", 20)
        assert (await world.step()).requeue_after_s == pytest.approx(30)

    async def has_shrunk() -> bool:
        return len(await world.pods("decode")) == 1

    await world.until(has_shrunk, "the instance has gone", 20)


def _own_redis(spec: Any) -> None:
    spec["scheduler"]["redis"] = {"managed": {}}


def _revision(namespace: str) -> Object:
    path = f"/apis/apps/v1/namespaces/{namespace}/controllerrevisions"
    kept = {"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": "probe"}}
    return {"path": path, "body": {**kept, "data": {}, "revision": 1}}


@pytest.mark.parametrize("surge", [0, 1])
async def test_a_revision_that_may_not_be_kept_is_told_of_and_what_serves_stays(
    world: PlayedWorld, namespace: str, forbids: Any, surge: int
) -> None:
    def base(spec: Any) -> None:
        spec["decodePools"][0]["update"] = {"maxSurge": surge, "maxUnavailable": 1}

    def edit(spec: Any) -> None:
        base(spec)
        spec["engine"]["args"] = ["--max-num-seqs=17"]
        spec["kvCachePools"][0]["segmentSize"] = "3Gi"

    roles = ("decode", "prefill", "store-node", "store-master")
    await world.bring_up(base)
    before = {role: await world.uids(role) for role in roles}
    routable = await world.routable("decode")
    async with forbids("CREATE", "apps", "controllerrevisions", _revision(namespace)):
        await world.apply(edit)
        for _ in range(4):
            await world.step()
        degraded = await world.condition("Degraded", *DECODE)
        assert degraded["reason"] == "AdmissionRefused"
        assert "ControllerRevision q-decode-" in degraded["message"]
        assert {role: await world.uids(role) for role in roles} == before
        assert await world.routable("decode") == routable

    async def is_replaced() -> bool:
        now = await world.uids("decode")
        return await world.is_ready() and before["decode"].items().isdisjoint(now.items())

    await world.until(is_replaced, "the rollout has come through")


async def test_a_managed_redis_whose_revision_may_not_be_kept_stays(
    world: PlayedWorld, client: Client, namespace: str, forbids: Any
) -> None:
    await world.bring_up(_own_redis)
    before = await world.uids("redis")
    async with forbids("CREATE", "apps", "controllerrevisions", _revision(namespace)):
        # Its password is another one then, which asks for a Redis that knows it.
        await client.delete(SECRET, namespace, "q-redis", uid=await _uid(world, "Secret", "q-redis"))
        for _ in range(4):
            await world.step()
        assert await world.uids("redis") == before
        ready = await world.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "AdmissionRefused")

    async def is_replaced() -> bool:
        redis = await world.uids("redis")
        return await world.is_ready() and bool(redis) and before.items().isdisjoint(redis.items())

    await world.until(is_replaced, "a Redis has come that knows the password")


async def test_a_finalizer_that_may_not_be_put_back_takes_no_instance_away(
    world: PlayedWorld, client: Client, namespace: str, forbids: Any
) -> None:
    def base(spec: Any) -> None:
        spec["decodePools"][0]["update"] = {"maxSurge": 0, "maxUnavailable": 1}

    def edit(spec: Any) -> None:
        base(spec)
        spec["engine"]["args"] = ["--max-num-seqs=17"]

    await world.bring_up(base)
    before = await world.uids("decode")
    body = {"metadata": {"finalizers": None}}
    await client.patch(DECODE_POOL, namespace, "q-decode", body, how="merge", manager="kubectl")
    path = f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}/mooncakedecodepools/q-decode"
    probe = {"path": path, "body": {"metadata": {"labels": {"a": "b"}}}}
    async with forbids("UPDATE", "mooncake.io", "mooncakedecodepools", probe):
        await world.apply(edit)
        for _ in range(4):
            await world.step()
        degraded = await world.condition("Degraded", *DECODE)
        assert degraded["message"].startswith("the finalizers of pool q-decode: ")
        assert await world.uids("decode") == before

    async def is_replaced() -> bool:
        now = await world.uids("decode")
        return await world.is_ready() and before.items().isdisjoint(now.items())

    await world.until(is_replaced, "the rollout has come through")


async def test_a_managed_redis_whose_secret_may_not_be_made_stays_as_it_is(
    world: PlayedWorld, client: Client, namespace: str, forbids: Any
) -> None:
    await world.bring_up(_own_redis)
    before = await world.uids("redis")
    probe = {
        "path": f"/api/v1/namespaces/{namespace}/secrets",
        "body": {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "probe"}},
    }
    async with forbids("CREATE", "", "secrets", probe):
        await client.delete(SECRET, namespace, "q-redis", uid=await _uid(world, "Secret", "q-redis"))
        await world.step()
        revisions = await _revisions(client, namespace)
        for _ in range(4):
            await world.step()
            assert await world.uids("redis") == before
        assert await _revisions(client, namespace) == revisions
        ready = await world.condition("Ready")
        assert ready["reason"] == "AdmissionRefused"
        assert ready["message"].startswith("Secret q-redis: ")

    async def is_replaced() -> bool:
        redis = await world.uids("redis")
        return await world.is_ready() and bool(redis) and before.items().isdisjoint(redis.items())

    await world.until(is_replaced, "a Redis has come that knows the new password")
    after = await world.uids("redis")
    await world.step()
    assert await world.uids("redis") == after


async def test_no_redis_is_made_while_its_secret_is_somebody_elses(
    world: PlayedWorld, client: Client, namespace: str
) -> None:
    foreign = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "q-redis", "namespace": namespace}}
    made = await client.create({**foreign, "stringData": {"password": "theirs"}}, manager="theirs")
    await world.apply(_own_redis)
    await world.nodes.add_scheduler("q")
    for _ in range(4):
        await world.step()
    assert await world.pods("redis") == []
    assert await _revisions(client, namespace) == set()
    assert (await world.condition("Ready"))["reason"] == "NameTaken"
    # Nor is anything written, pass for pass.
    assert "controllerrevisions" not in {plural for _, plural in world.writes}
    await client.delete(SECRET, namespace, "q-redis", uid=uid_of(made))

    async def is_made() -> bool:
        return await world.pods("redis") == ["q-redis-0"]

    await world.until(is_made, "the Redis comes with its Secret")


async def test_a_password_of_redis_that_cannot_be_used_is_told_of_as_such(
    world: PlayedWorld, client: Client, namespace: str
) -> None:
    await world.bring_up(_own_redis)
    before = await world.uids("redis")
    body = {"stringData": {"password": "a b"}}
    await client.patch(SECRET, namespace, "q-redis", body, how="merge", manager="kubectl-edit")
    for _ in range(4):
        await world.step()
    ready = await world.condition("Ready")
    assert ready["reason"] == "FieldManagerConflict"
    assert ready["message"].startswith("Secret q-redis: ")
    assert "kubectl-edit" in ready["message"]
    assert await world.uids("redis") == before
    await client.delete(SECRET, namespace, "q-redis", uid=await _uid(world, "Secret", "q-redis"))

    async def is_replaced() -> bool:
        redis = await world.uids("redis")
        return await world.is_ready() and bool(redis) and before.items().isdisjoint(redis.items())

    await world.until(is_replaced, "a Redis has come that knows the new password")


async def test_a_finalizer_that_may_not_be_taken_off_a_pool_without_a_cluster_is_told_once(
    world: PlayedWorld, client: Client, namespace: str, forbids: Any
) -> None:
    await world.bring_up()
    path = f"/apis/mooncake.io/v1alpha1/namespaces/{namespace}/mooncakedecodepools/q-decode"
    probe = {"path": path, "body": {"metadata": {"labels": {"a": "b"}}}}
    async with forbids("UPDATE", "mooncake.io", "mooncakedecodepools", probe):
        for resource, name in ((CLUSTER, "q"), (DECODE_POOL, "q-decode")):
            await client.delete(resource, namespace, name, uid=await _uid(world, resource.kind, name))

        async def is_told() -> bool:
            degraded = await world.condition("Degraded", *DECODE)
            return str(degraded.get("message")).startswith("the finalizers of pool q-decode: ")

        await world.until(is_told, "the pool says what is refused", 40)
        said = await world.get(*DECODE)
        for _ in range(3):
            result = await world.step()
            # All that is written is what is refused.
            assert world.writes == [("patch", "mooncakedecodepools")]
            assert result.requeue_after_s == pytest.approx(30)
        assert await world.get(*DECODE) == said

    async def is_gone() -> bool:
        return await world.get(*DECODE) is None

    await world.until(is_gone, "the pool has gone")
    # Of what is gone nothing is kept.
    assert world.reconciler._memories == {}


async def _uid(world: PlayedWorld, kind: str, name: str) -> str:
    live = await world.get(kind, name)
    assert live is not None
    return uid_of(live)


async def _revisions(client: Client, namespace: str) -> set[str]:
    """Of the managed Redis."""
    found = map(name_of, await client.list_all(CONTROLLER_REVISION, namespace))
    return {name for name in found if name.startswith("q-redis-")}


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
