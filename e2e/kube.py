"""The API server as tests see it: plain dictionaries, kinds by name.

Not the operator's client: a test that spoke through that one would share its mistakes. Credentials, TLS and
tokens are those that ``kubernetes.aio`` reads from a kubeconfig.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

Object = dict[str, Any]

_PATCHES = {
    "json": "application/json-patch+json",
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
PATIENCE_S = 400.0
"""On a machine that does five other things."""
_EVENT_BYTES = 8 * 1024 * 1024


class KubeError(Exception):
    """The API server refused; ``message`` is its own."""

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        self.status = status
        self.reason: str = document.get("reason", "")
        self.message: str = document.get("message", "")
        super().__init__(f"{status} {self.reason}: {self.message}")


@dataclass(frozen=True)
class Place:
    """Where objects of a kind live."""

    api_version: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None, *rest: str | None) -> str:
        root = "/apis" if "/" in self.api_version else "/api"
        within = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        return "/".join(
            [f"{root}/{self.api_version}{within}/{self.plural}", *(part for part in rest if part)]
        )


class Kube:
    """A client for one event loop: ``async with Kube.of(kubeconfig) as kube``.

    Kinds are written as in manifests; where two groups have the same one, as ``Event.events.k8s.io``.
    """

    def __init__(self, configuration: Configuration, connections: int = 100) -> None:
        self._configuration = configuration
        self._connections = connections
        self._places: dict[str, Place] = {}
        self.calls = 0

    @classmethod
    async def of(cls, kubeconfig: Path) -> Self:
        """A client with the credentials of a kubeconfig."""
        configuration = Configuration()
        await config.load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        return cls(configuration)

    async def __aenter__(self) -> Self:
        async with ApiClient(self._configuration) as api:  # only for what it makes of the configuration
            tls: ssl.SSLContext = api.rest_client.ssl_context
            headers: dict[str, str] = {}
            await api.update_params_for_auth(headers, [], ["BearerToken"], "", "GET", None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=self._connections),
            headers=headers | {"User-Agent": "mooncake-e2e"},
            read_bufsize=_EVENT_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        place = await self.place(kind)
        return await self.call("GET", place.path(namespace, name))

    async def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """Like :meth:`get`, but None where there is no such object."""
        try:
            return await self.get(kind, name, namespace)
        except KubeError as error:
            if error.status != 404:
                raise
            return None

    async def list_all(
        self, kind: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """All objects of a kind, in a namespace or everywhere; selectors as kubectl takes them."""
        items, _ = await self.snapshot(kind, namespace, labels=labels, fields=fields)
        return items

    async def snapshot(
        self, kind: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """Like :meth:`list_all`, with the resource version from which a watch goes on."""
        place = await self.place(kind)
        found = await self.call("GET", place.path(namespace), query=_selectors(labels, fields))
        items = [{"apiVersion": place.api_version, "kind": kind, **item} for item in found["items"]]
        return items, found["metadata"]["resourceVersion"]

    async def create(self, obj: Object) -> Object:
        place = await self.place(obj["kind"], obj["apiVersion"])
        return await self.call("POST", place.path(obj["metadata"].get("namespace")), obj)

    async def apply(
        self, obj: Object, *, manager: str = "e2e", force: bool = True, subresource: str | None = None
    ) -> Object:
        """Server-side apply."""
        place = await self.place(obj["kind"], obj["apiVersion"])
        metadata = obj["metadata"]
        path = place.path(metadata.get("namespace"), metadata["name"], subresource)
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self.call("PATCH", path, obj, query=query, content_type=_PATCHES["apply"])

    async def apply_all(self, objects: Iterable[Object], namespace: str | None = None) -> list[Object]:
        """Apply manifests in their order, into a namespace where they name none."""
        applied = []
        for obj in objects:
            place = await self.place(obj["kind"], obj["apiVersion"])
            if namespace and place.namespaced:
                obj = {**obj, "metadata": {"namespace": namespace, **obj["metadata"]}}
            applied.append(await self.apply(obj))
        return applied

    async def patch(
        self,
        kind: str,
        name: str,
        body: Any,
        namespace: str | None = None,
        *,
        how: Literal["json", "merge", "strategic"] = "merge",
        subresource: str | None = None,
    ) -> Object:
        place = await self.place(kind)
        path = place.path(namespace, name, subresource)
        return await self.call("PATCH", path, body, content_type=_PATCHES[how])

    async def scale(self, kind: str, name: str, replicas: int, namespace: str) -> None:
        """What ``kubectl scale`` does."""
        await self.patch(kind, name, {"spec": {"replicas": replicas}}, namespace, subresource="scale")

    async def delete(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        grace_s: int | None = None,
        uid: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> bool:
        """Begin to delete an object; False where there was none (or, with ``uid``, another one)."""
        place = await self.place(kind)
        body: Object = {"propagationPolicy": propagation}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self.call("DELETE", place.path(namespace, name), body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise
            return False
        return True

    async def logs(self, pod: str, namespace: str, container: str | None = None) -> str:
        """What a container printed."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        if container:
            path += f"?container={container}"
        async with self._session.get(self._configuration.host + path) as response:
            return await response.text()

    @asynccontextmanager
    async def port_forward(
        self, pod: str, namespace: str, port: int
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A stream to a port of a Pod; messages begin with their channel (see :mod:`e2e.tunnel`)."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}"
        async with self._session.ws_connect(
            self._configuration.host + path, protocols=("v4.channel.k8s.io",), max_msg_size=0
        ) as stream:
            yield stream

    async def watch(
        self, kind: str, resource_version: str, namespace: str | None = None, *, fields: str = ""
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes after a resource version, until the server ends the stream.

        Yields:
            ``ADDED``, ``MODIFIED`` or ``DELETED``, and the object.

        Raises:
            KubeError: with status 410, the version is too old: take a new snapshot.
        """
        place = await self.place(kind)
        query = _selectors("", fields) | {
            "watch": "1",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
        }
        url = f"{self._configuration.host}{place.path(namespace)}?{urlencode(query)}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with self._session.get(url, timeout=timeout) as response:
            if response.status != 200:
                raise KubeError(response.status, _document(await response.read()))
            while line := await response.content.readline():
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    raise KubeError(event["object"].get("code", 500), event["object"])
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["object"]

    async def place(self, kind: str, api_version: str = "") -> Place:
        """Where a kind lives; asks the server again where it is not known yet.

        Raises:
            LookupError: the server has no such kind.
        """
        group = api_version.rpartition("/")[0]
        key = f"{kind}.{group}" if group else kind
        if key not in self._places:
            await self._discover()
        if key not in self._places:
            raise LookupError(f"the API server knows no kind {key}")
        return self._places[key]

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """One request; the decoded answer.

        Raises:
            KubeError: the answer is no success.
        """
        self.calls += 1
        url = f"{self._configuration.host}{path}"
        if query:
            url += f"?{urlencode(query)}"
        headers = {"Content-Type": content_type, "Accept": accept}
        data = None if body is None else msgspec.json.encode(body)
        async with self._session.request(method, url, data=data, headers=headers) as response:
            content = await response.read()
        document = _document(content)
        if response.status >= 400:
            raise KubeError(response.status, document)
        return document

    async def _discover(self) -> None:
        places: dict[str, Place] = {}
        for root in ("/api", "/apis"):
            for group in (await self.call("GET", root, accept=_DISCOVERY))["items"]:
                name = group["metadata"].get("name", "")
                preferred = group["versions"][0]
                api_version = f"{name}/{preferred['version']}" if name else preferred["version"]
                for resource in preferred["resources"]:
                    kind = resource["responseKind"]["kind"]
                    place = Place(api_version, resource["resource"], resource["scope"] == "Namespaced")
                    places.setdefault(kind, place)
                    places.setdefault(f"{kind}.{name}", place)
        self._places = places


async def eventually(
    what: str, holds: Callable[[], Awaitable[object]], *, within_s: float = PATIENCE_S, every_s: float = 0.2
) -> None:
    """Wait until something is true (or, asserting, no longer fails).

    How long it takes is asserted nowhere: time is only over where nobody would believe in it any more.

    Raises:
        AssertionError: it was not in time; with what the last try said.
    """
    end = asyncio.get_running_loop().time() + within_s
    while True:
        said = ""
        try:
            if await holds():
                return
        except (AssertionError, KubeError, LookupError) as error:
            said = f": {error}"
        if asyncio.get_running_loop().time() > end:
            raise AssertionError(f"{what}: not within {within_s:.0f} s{said}")
        await asyncio.sleep(every_s)


def condition(obj: Mapping[str, Any], kind: str) -> Object | None:
    """One of an object's conditions by its type."""
    conditions = obj.get("status", {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == kind), None)


def is_true(obj: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition is there and True."""
    found = condition(obj, kind)
    return found is not None and found["status"] == "True"


def _selectors(labels: str, fields: str) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in selectors.items() if value}


def _document(content: bytes) -> Object:
    try:
        decoded = msgspec.json.decode(content) if content else {}
    except msgspec.DecodeError:
        return {"message": content[:500].decode(errors="replace")}
    return decoded if isinstance(decoded, dict) else {"items": decoded}
