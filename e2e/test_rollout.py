"""Rollouts of real Pods under a steady load: what is promised holds after every single change of a Pod.

One cluster of four prefill and four decode instances is taken from revision to revision; each test begins
with all instances of one revision and leaves it so. One that failed may not have: who begins brings it about,
so that a second try is one.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from e2e.installation import Operator
from e2e.kube import Kube, condition, eventually
from e2e.load import Load
from e2e.rollout_watch import Promise, RolloutWatch, Seen
from e2e.served import Explanations, Manifest, ServedCluster, a_cluster, changed, served, under_load
from e2e.under_test import ClusterUnderTest

REPLICAS = 4
MAX_SKEW = 25
ROLES = ("prefill", "decode")
ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2400, func_only=True)]


@dataclass
class Rolling:
    """A cluster under load, and all that looks at it."""

    cluster: ServedCluster
    watch: RolloutWatch
    load: Load
    explanations: Explanations
    revisions: int = 0

    async def at_rest(self) -> None:
        """Let what a failed test left under way come to its end; what broke was told and counts no more."""
        self.watch.promise = None
        self.watch.broken.clear()
        self.explanations.missing.clear()
        if not _is_of_one_revision(self.watch.now):
            await self.cluster.apply(self.next_revision())
            await self.watch.until("all are of one revision", _is_of_one_revision)
        await self.cluster.ready()

    def next_image(self, cluster: ClusterUnderTest) -> Manifest:
        """The manifest with the engines' image under another name."""
        self.revisions += 1
        image = cluster.image_again("mooncake", f"rollout-{self.revisions}")
        return changed(self.cluster.manifest, "engine.image", image)

    def next_revision(self) -> Manifest:
        """The manifest with another argument for all engines, which changes how they pair; it is not held."""
        self.revisions += 1
        manifest = changed(self.cluster.manifest, "engine.args", [f"--max-num-seqs={100 + self.revisions}"])
        for pool in ("prefillPools", "decodePools"):
            manifest["spec"][pool][0].pop("update", None)
        return manifest

    async def begin(self, manifest: Manifest) -> str:
        """Apply it as a new revision; returns the old one."""
        (old,) = self.watch.now.routable["prefill"]
        self.watch.promise = Promise(REPLICAS, MAX_SKEW / 100, left=old)
        await self.cluster.apply(manifest)
        return old

    async def until_replaced(self, what: str, old: str) -> str:
        """Wait until nothing of a revision is left; returns the one that all have then."""
        await self.watch.until(what, lambda seen: _is_settled(seen) and not _counts(seen, old))
        (new,) = self.watch.now.routable["prefill"]
        assert self.watch.now.routable == {role: {new: REPLICAS} for role in ROLES}
        await self.cluster.ready()
        return new

    async def must_stand_still(self) -> None:
        """Nothing of the pools changes while requests are served."""
        before = len(self.watch.history)
        await self.load.more(30)
        assert self.watch.history[before:] == []

    async def all_is_well(self) -> None:
        """No request failed, and each was placed on a pair of one revision."""
        self.watch.must_hold()
        self.load.must_hold()
        await self.explanations.caught_up(self.load)
        assert self.explanations.missing == []
        assert self.explanations.mixed() == []
        for placement in self.explanations.placements():
            for leg in ("prefill", "decode"):
                # The schedulers' word against the Pods' labels.
                assert placement[f"{leg}_revision"] in self.watch.pairings[placement[leg]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rolling(
    cluster: ClusterUnderTest, operator: Operator, module_kube: Kube, module_namespace: str
) -> AsyncIterator[Rolling]:
    """Four prefill and four decode instances with a load upon them."""
    manifest = a_cluster("kimi", prefill=REPLICAS, decode=REPLICAS)
    manifest = changed(manifest, "coordination.rollout.maxSkew", f"{MAX_SKEW}%")
    async with (
        served(cluster, module_kube, module_namespace, manifest) as kimi,
        RolloutWatch(module_kube, module_namespace) as watch,
        under_load(kimi) as (load, explanations),
    ):
        yield Rolling(kimi, watch, load, explanations)


async def test_a_new_image_goes_the_planned_way_though_the_operator_is_killed(
    rolling: Rolling, cluster: ClusterUnderTest, operator: Operator
) -> None:
    if not cluster.takes_images:
        pytest.skip("another image can be brought into this cluster only with E2E_LOAD_IMAGE")
    await rolling.at_rest()
    watch = rolling.watch
    began = len(watch.history) - 1
    old = await rolling.begin(rolling.next_image(cluster))

    await watch.until("half is replaced", lambda seen: _new(seen, "prefill", old) == 2)
    operator.kill()
    new = await rolling.until_replaced("all are replaced", old)

    planned = await _planned()
    for role in ROLES:
        assert watch.counts(role, old, new, since=began) == planned[role]
    await rolling.all_is_well()


async def test_a_partition_and_a_pause_hold_a_rollout_where_it_is(rolling: Rolling) -> None:
    await rolling.at_rest()
    whole = rolling.next_revision()
    parted = whole
    for pool in ("prefillPools", "decodePools"):
        parted = changed(parted, f"{pool}.0.update.partition", 2)
    old = await rolling.begin(parted)

    def is_parted(seen: Seen) -> bool:
        return _is_settled(seen, present=REPLICAS) and _new(seen, "decode", old) == 2

    await rolling.watch.until("the partition is reached", is_parted)
    assert _new(rolling.watch.now, "prefill", old) == 2
    await rolling.must_stand_still()

    await rolling.cluster.apply(whole)
    await rolling.watch.until("it goes on", lambda seen: _new(seen, "decode", old) == 3)
    paused = whole
    for pool in ("prefillPools", "decodePools"):
        paused = changed(paused, f"{pool}.0.update.paused", True)
    await rolling.cluster.apply(paused)
    await rolling.watch.until("it pauses", _is_settled)
    assert _counts(rolling.watch.now, old)
    await rolling.must_stand_still()
    assert await _progressing(rolling.cluster) == "Paused"

    await rolling.cluster.apply(whole)
    await rolling.until_replaced("all are replaced", old)
    await rolling.all_is_well()


async def test_a_rollout_that_is_taken_back_keeps_what_was_not_replaced(rolling: Rolling) -> None:
    await rolling.at_rest()
    before = rolling.cluster.manifest
    old = await rolling.begin(rolling.next_revision())
    await rolling.watch.until("half is replaced", lambda seen: _new(seen, "decode", old) == 2)
    survivors = {pod["metadata"]["uid"] for pod in await rolling.cluster.live_pods() if _has(pod, old)}
    (abandoned,) = rolling.watch.now.routable["decode"].keys() - {old}

    assert rolling.watch.promise is not None
    rolling.watch.promise.left = abandoned
    await rolling.cluster.apply(before)
    assert await rolling.until_replaced("the old revision is back", abandoned) == old

    there = {pod["metadata"]["uid"] for pod in await rolling.cluster.live_pods()}
    kept = survivors & there
    # What was draining when the operator heard of it may have been too far gone to be recalled.
    assert len(kept) >= len(survivors) - 2
    await rolling.all_is_well()


def _new(seen: Seen, role: str, old: str) -> int:
    return sum(count for revision, count in seen.routable[role].items() if revision != old)


def _is_of_one_revision(seen: Seen) -> bool:
    revisions = {revision for role in ROLES for revision in seen.made[role]}
    return len(revisions) == 1 and _is_settled(seen, present=REPLICAS)


def _counts(seen: Seen, revision: str) -> int:
    return sum(seen.made[role].get(revision, 0) for role in ROLES)


def _is_settled(seen: Seen, present: int = 0) -> bool:
    """Nothing comes or goes."""
    sizes = (present,) if present else (REPLICAS, REPLICAS + 1)
    return all(
        sum(seen.made[role].values()) == sum(seen.routable[role].values()) == seen.present[role]
        and seen.present[role] in sizes
        for role in ROLES
    )


def _has(pod: Manifest, revision: str) -> bool:
    labels: dict[str, str] = pod["metadata"]["labels"]
    return labels.get("mooncake.io/pairing") == revision


async def _progressing(cluster: ServedCluster) -> str:
    reason = ""

    async def said() -> bool:
        nonlocal reason
        pool = await cluster.get("MooncakePrefillPool", f"{cluster.name}-prefill")
        found = condition(pool, "Progressing")
        reason = found["reason"] if found else ""
        return found is not None

    await eventually("the pool says why it does not go on", said)
    return reason


async def _planned() -> dict[str, list[tuple[int, int]]]:
    """What the command says of such a rollout: routable old and new ones by role, step by step."""
    command = [sys.executable, "-P", "-m", "mooncakectl", "rollout", "plan", "--json"]
    command += [f"--prefill={REPLICAS}", f"--decode={REPLICAS}", f"--max-skew={MAX_SKEW}"]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, text=True)
    found: dict[str, list[tuple[int, int]]] = {role: [] for role in ROLES}
    for step in json.loads(ran.stdout)["steps"]:
        for role in ROLES:
            pair = (step["pools"][role]["old"], step["pools"][role]["new"])
            if pair not in found[role]:
                found[role].append(pair)
    return found
