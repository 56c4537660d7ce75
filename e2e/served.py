"""A MooncakeCluster that serves, as those see it who use it and those who look after it."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import yaml

from e2e.kube import Kube, KubeError, eventually, is_true
from e2e.load import Load, Sent
from e2e.rollout_watch import RolloutWatch
from e2e.under_test import ClusterUnderTest

ROOT = Path(__file__).resolve().parent.parent
MODEL = "llama3-70b"
TIME_SCALE = 1
"""As fast as life: streams that last while little is computed, for a small machine runs a dozen engines."""
_ADMIN_PORT = 21_001
_ASKED_TIMES = 5
_LISTEN_EVERY_S = 2.0

Manifest = dict[str, Any]


def a_cluster(name: str, *, prefill: int, decode: int, schedulers: int = 2) -> Manifest:
    """The quickstart with other numbers."""
    manifest: Manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    manifest["metadata"]["name"] = name
    spec = manifest["spec"]
    spec["engine"]["simulated"]["timeScale"] = TIME_SCALE
    spec["prefillPools"][0]["replicas"] = prefill
    spec["decodePools"][0] |= {"replicas": decode, "drain": {"timeoutSeconds": 60}}
    spec["prefillPools"][0]["drain"] = {"timeoutSeconds": 60}
    spec["scheduler"]["replicas"] = schedulers
    return manifest


def changed(manifest: Manifest, place: str, value: object) -> Manifest:
    """A manifest with another value at a dotted path below spec; numbers are places in lists."""
    copied = deepcopy(manifest)
    at: Any = copied["spec"]
    *way, last = place.split(".")
    for step in way:
        at = at[int(step)] if step.isdecimal() else at.setdefault(step, {})
    at[int(last) if last.isdecimal() else last] = value
    return copied


class ServedCluster:
    """One MooncakeCluster in a namespace of its own."""

    def __init__(self, under_test: ClusterUnderTest, kube: Kube, namespace: str, manifest: Manifest) -> None:
        self.under_test = under_test
        self.kube = kube
        self.namespace = namespace
        self.manifest = manifest
        self.name: str = manifest["metadata"]["name"]
        self.url = ""
        """Of the schedulers' Service, reachable from the test."""
        self._admin: dict[str, str] = {}
        self._open = AsyncExitStack()
        self._http = httpx.AsyncClient(timeout=10, trust_env=False)

    async def apply(self, manifest: Manifest) -> None:
        """What a user does to change it."""
        self.manifest = manifest
        await self.kube.apply_all([manifest], self.namespace)

    async def ready(self) -> None:
        """Wait until the present generation is Ready."""

        async def holds() -> bool:
            found = await self.kube.get("MooncakeCluster", self.name, self.namespace)
            conditions = found.get("status", {}).get("conditions", ())
            said = [f"{c['type']}={c['status']}: {c.get('message', '')}" for c in conditions]
            seen = found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"]
            whole = seen and is_true(found, "Ready")
            assert whole, "; ".join(said)
            return whole

        await eventually(f"{self.name} is Ready", holds)

    async def pods(self, **labels: str) -> list[Manifest]:
        """Its Pods by labels below ``mooncake.io/``, those that end included."""
        wanted = {"cluster": self.name, **labels}
        selector = ",".join(f"mooncake.io/{key}={value}" for key, value in wanted.items())
        return await self.kube.list_all("Pod", self.namespace, labels=selector)

    async def live_pods(self, **labels: str) -> list[Manifest]:
        """Its Pods that were not told to end."""
        return [pod for pod in await self.pods(**labels) if "deletionTimestamp" not in pod["metadata"]]

    async def get(self, kind: str, name: str) -> Manifest:
        """One of its objects."""
        return await self.kube.get(kind, name, self.namespace)

    async def instances(self) -> dict[str, Manifest]:
        """What one scheduler knows of the instances, by id."""
        for pod in await self.live_pods(role="scheduler"):
            if (answer := await self._ask(pod, "/instances")) is not None:
                return {each["id"]: each for each in answer["instances"]}
        raise LookupError("no scheduler answers")

    async def drain(self, instance: str, *, end: bool = False) -> None:
        """Mark an instance by the admin API, as ``mooncakectl drain`` does, or take the mark away."""
        pod = (await self.live_pods(role="scheduler"))[0]
        headers = {"Authorization": f"Bearer {await self._token()}"}
        url = f"{await self._admin_url(pod)}/instances/{instance}/drain"
        answer = await self._http.request("DELETE" if end else "POST", url, headers=headers)
        answer.raise_for_status()

    async def explanation(self, request_id: str) -> Manifest | None:
        """Why a request went where it went, asked of each scheduler that runs; None = none knows."""
        for pod in await self.pods(role="scheduler"):
            if (answer := await self._ask(pod, f"/decisions/{request_id}")) is not None:
                return answer
        return None

    async def _ask(self, pod: Manifest, path: str) -> Manifest | None:
        try:
            url = await self._admin_url(pod)
            headers = {"Authorization": f"Bearer {await self._token()}"}
            answer = await self._http.get(f"{url}{path}", headers=headers)
        except (httpx.HTTPError, OSError):
            return None
        if answer.status_code != 200:
            return None
        found: Manifest = answer.json()
        return found

    async def _admin_url(self, pod: Manifest) -> str:
        uid, address = pod["metadata"]["uid"], pod.get("status", {}).get("podIP")
        if not address:
            raise OSError(f"{pod['metadata']['name']} has no address yet")
        if uid not in self._admin:
            opened = self.under_test.forward_pod(self.kube, pod, _ADMIN_PORT)
            self._admin[uid] = await self._open.enter_async_context(opened)
        return self._admin[uid]

    async def _token(self) -> str:
        secret = await self.kube.get("Secret", f"{self.name}-admin", self.namespace)
        return base64.b64decode(secret["data"]["token"]).decode()

    async def open(self) -> None:
        """Begin to forward its Service."""
        service = f"{self.name}-scheduler"
        forward = self.under_test.forward(self.kube, service, self.namespace, 80)
        self.url = await self._open.enter_async_context(forward)

    async def close(self) -> None:
        """End all forwarding."""
        await self._http.aclose()
        await self._open.aclose()


@asynccontextmanager
async def served(
    under_test: ClusterUnderTest, kube: Kube, namespace: str, manifest: Manifest
) -> AsyncIterator[ServedCluster]:
    """Apply a cluster, wait until it is Ready, and reach it."""
    cluster = ServedCluster(under_test, kube, namespace, manifest)
    try:
        await cluster.apply(manifest)
        await cluster.ready()
        await cluster.open()
        yield cluster
    finally:
        await cluster.close()
        await kube.delete("MooncakeCluster", cluster.name, namespace)

        async def are_gone() -> bool:
            return not await cluster.pods()

        # A namespace that is deleted with Pods in it is looked at again after half of their longest grace.
        await eventually(f"the Pods of {cluster.name} are gone", are_gone)


class _Words:
    """What schedulers said, those included that are gone meanwhile: printed where a request went wrong."""

    def __init__(self, cluster: ServedCluster) -> None:
        self._cluster = cluster
        self._by_pod: dict[str, str] = {}

    async def listen(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(aiohttp.ClientError, KubeError, OSError):
                for pod in await self._cluster.pods(role="scheduler"):
                    name = pod["metadata"]["name"]
                    self._by_pod[name] = await self._cluster.kube.logs(name, self._cluster.namespace)
            await asyncio.sleep(_LISTEN_EVERY_S)

    def tell(self, load: Load) -> None:
        """Print them, if there is reason to."""
        if any(sent.wrong for sent in load.sent):
            for name, said in self._by_pod.items():
                print(f"{name}:\n{said}")


@asynccontextmanager
async def under_load(cluster: ServedCluster, clients: int = 6) -> AsyncIterator[tuple[Load, "Explanations"]]:
    """Send it requests all the time, and gather the explanation of each."""
    explanations, words = Explanations(cluster), _Words(cluster)
    listening = asyncio.create_task(words.listen())
    load = Load(cluster.url, MODEL, clients=clients, on_done=explanations.gather)
    try:
        async with load:
            await load.more(clients)
            yield load, explanations
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        words.tell(load)


@dataclass(frozen=True)
class Serving:
    """A cluster that serves a steady load, and a watch on its engines."""

    cluster: ServedCluster
    load: Load
    watch: RolloutWatch


@asynccontextmanager
async def serving(
    under_test: ClusterUnderTest, kube: Kube, namespace: str, replicas: int
) -> AsyncIterator[Serving]:
    """So many prefill and decode instances and two schedulers, with a load upon them."""
    manifest = a_cluster("kimi", prefill=replicas, decode=replicas)
    async with (
        served(under_test, kube, namespace, manifest) as kimi,
        RolloutWatch(kube, namespace) as watch,
        under_load(kimi) as (load, _),
    ):
        yield Serving(kimi, load, watch)


class Explanations:
    """The explanation of every request of a load: `gather` as its ``on_done``."""

    def __init__(self, cluster: ServedCluster) -> None:
        self._cluster = cluster
        self._limit = asyncio.Semaphore(4)
        self.by_request: dict[str, Manifest] = {}
        self.missing: list[Sent] = []

    async def gather(self, sent: Sent) -> None:
        """Fetch one."""
        for _ in range(_ASKED_TIMES):
            async with self._limit:
                found = await self._cluster.explanation(sent.request_id)
            if found is not None:
                self.by_request[sent.request_id] = found
                return
            # On a busy machine an admin port may take longer than one waits for it.
            await asyncio.sleep(1)
        self.missing.append(sent)

    async def caught_up(self, load: Load) -> None:
        """Wait until every request that has ended is explained."""
        ended = {sent.request_id for sent in load.sent}

        async def holds() -> bool:
            return ended <= self.by_request.keys() | {sent.request_id for sent in self.missing}

        await eventually("every request is explained", holds)

    def placements(self) -> list[Manifest]:
        """Where requests went."""
        return [found["placement"] for found in self.by_request.values()]

    def mixed(self) -> list[Manifest]:
        """Placements on a pair of two revisions, or on a decode instance alone."""
        return [p for p in self.placements() if p["prefill_revision"] != p["decode_revision"]]
