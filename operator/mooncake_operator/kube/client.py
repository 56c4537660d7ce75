"""The few calls on the API server that the operator makes, with plain dictionaries in and out.

Authentication, TLS and connections are those of `kubernetes.aio`; its typed models are not used, since the
operator's objects are rendered as plain data.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration

from mooncake_operator.kube.errors import GoneError, KubeError, UnavailableError, error_of
from mooncake_operator.kube.resources import Object, Resource, name_of, resource_of
from mooncake_operator.kube.retry import Chance, RetryRules

_JSON = "application/json"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
_PATCHES = {
    "json": "application/json-patch+json",
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
}
_USER_AGENT = "mooncake-operator"
_LARGEST_PAGE = 500
AT_ONCE = 32
"""Requests of one client at a time. The API server queues an account's requests together: more of them would
wait there all the same, and behind them the Lease's renewal, which has a client of its own."""
_OPENAPI = Resource("v3", "OpenAPI", "openapi", namespaced=False)
"""No resource, but what its requests are counted as."""

Observer = Callable[[str, str, int, float], None]
"""Told of each answer: verb, plural, HTTP status (0 = none), seconds."""


def _unobserved(verb: str, plural: str, status: int, seconds: float) -> None:
    """The observer where nobody counts."""


class Client:
    """Calls on one API server, within one event loop.

    Use it as an async context manager. Errors are those of `kube.errors`; requests that may be repeated are
    repeated a few times first (`RetryRules`).
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout_s: float = 30.0,
        rules: RetryRules | None = None,
        chance: Chance = random.random,
        observer: Observer = _unobserved,
    ) -> None:
        """Take credentials; nothing is opened yet."""
        self._api = ApiClient(_settled(configuration))
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=5.0)
        self._rules = rules or RetryRules()
        self._chance = chance
        self._observer = observer
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        """Bind the client to the running loop."""
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._api.close()  # type: ignore[no-untyped-call]
        self._loop = None

    async def get(
        self, resource: Resource, namespace: str | None, name: str, *, subresource: str | None = None
    ) -> Object:
        """Read one object."""
        return await self._call("GET", resource, resource.path(namespace, name, subresource))

    async def list_all(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        without: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
        metadata_only: bool = False,
    ) -> list[Object]:
        """Read all objects of a namespace, or of all, that are selected; in pages.

        Items are given `kind` and `apiVersion`, which the API server leaves out.

        Args:
            resource: the kind.
            namespace: None = all.
            labels: that they must have.
            without: labels that they must not have.
            fields: that they must have, of those that the kind can be selected by.
            metadata_only: leave all but `metadata` where it is.
        """
        selectors = {
            "labelSelector": [*_pairs(labels, "="), *_pairs(without, "!=")],
            "fieldSelector": _pairs(fields, "="),
        }
        query = {name: ",".join(terms) for name, terms in selectors.items() if terms}
        accept = _METADATA if metadata_only else _JSON
        for attempt in (1, 2):
            try:
                return await self._pages(resource, namespace, query, accept)
            except GoneError:
                # The snapshot behind the pages was compacted away: only a fresh list is consistent.
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    async def openapi(self, api_version: str) -> Object:
        """What the API server says of a group's kinds: an OpenAPI v3 document.

        Raises:
            NotFoundError: it knows none of the group.
        """
        return await self._call("GET", _OPENAPI, f"/openapi/v3/apis/{api_version}")

    async def create(self, obj: Object, *, manager: str, dry_run: bool = False) -> Object:
        """POST an object under its own name; with `dry_run` all is checked and nothing is made.

        Raises:
            AlreadyExistsError: the name is taken, by whomever: read it and compare the owner's uid.
        """
        resource = resource_of(obj)
        path = resource.path(obj["metadata"].get("namespace"))
        query = {"fieldManager": manager, **({"dryRun": "All"} if dry_run else {})}
        return await self._call("POST", resource, path, body=obj, query=query)

    async def apply(
        self, obj: Object, *, manager: str, force: bool = False, subresource: str | None = None
    ) -> Object:
        """Server-side apply.

        Raises:
            FieldConflictError: without `force`, another manager holds a field with another value.
            PreconditionError: `metadata.uid` is given and the object of that name is another one.
        """
        resource = resource_of(obj)
        path = resource.path(obj["metadata"].get("namespace"), name_of(obj), subresource)
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._call("PATCH", resource, path, body=obj, query=query, content_type=_APPLY)

    async def patch(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        body: Any,
        *,
        how: Literal["json", "merge", "strategic"],
        manager: str,
        subresource: str | None = None,
    ) -> Object:
        """Change fields of an object that must exist."""
        path = resource.path(namespace, name, subresource)
        query = {"fieldManager": manager}
        return await self._call("PATCH", resource, path, body=body, query=query, content_type=_PATCHES[how])

    async def replace(self, obj: Object, *, manager: str) -> Object:
        """PUT an object; with its resourceVersion this is compare-and-swap."""
        resource = resource_of(obj)
        path = resource.path(obj["metadata"].get("namespace"), name_of(obj))
        return await self._call("PUT", resource, path, body=obj, query={"fieldManager": manager})

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
    ) -> None:
        """Delete the very object that has this uid; a successor of the same name is left alone.

        Raises:
            NotFoundError: it is gone already.
            PreconditionError: another object has the name.
        """
        body: Object = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        await self._call("DELETE", resource, resource.path(namespace, name), body=body)

    async def _pages(
        self, resource: Resource, namespace: str | None, selectors: Mapping[str, str], accept: str
    ) -> list[Object]:
        query = {"limit": str(_LARGEST_PAGE), **selectors}
        identity = {"apiVersion": resource.api_version, "kind": resource.kind}
        found: list[Object] = []
        while True:
            page = await self._call(
                "GET", resource, resource.path(namespace), query=query, verb="list", accept=accept
            )
            found += [{**item, **identity} for item in page.get("items") or ()]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return found
            query["continue"] = token

    async def _call(
        self,
        method: str,
        resource: Resource,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = _JSON,
        verb: str | None = None,
        accept: str = _JSON,
    ) -> Object:
        # A POST that was lost on the way back would answer AlreadyExists, and look like someone else's.
        repeatable = method != "POST"
        attempt = 1
        while True:
            try:
                async with self._turns:
                    return await self._once(
                        method, resource, path, body, query or {}, content_type, verb, accept
                    )
            except KubeError as error:
                wait_s = self._rules.wait_s(attempt, error, repeatable=repeatable, chance=self._chance)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _once(
        self,
        method: str,
        resource: Resource,
        path: str,
        body: Any,
        query: Mapping[str, str],
        content_type: str,
        verb: str | None,
        accept: str,
    ) -> Object:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a Client belongs to the event loop it was opened in: `async with Client(…)`")
        began_s, status = time.monotonic(), 0
        try:
            status, content, headers = await self._exchange(method, path, body, query, content_type, accept)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = str(error) or type(error).__name__
            raise UnavailableError(0, "NoAnswer", f"the API server does not answer: {said}") from error
        finally:
            self._observer(verb or method.lower(), resource.plural, status, time.monotonic() - began_s)
        if status >= 300:
            raise error_of(status, content, headers)
        return _object(status, content)

    async def _exchange(
        self, method: str, path: str, body: Any, query: Mapping[str, str], content_type: str, accept: str
    ) -> tuple[int, bytes, Mapping[str, str]]:
        headers = {
            "Accept": accept,
            # Packing and unpacking a list costs both sides more than its way does.
            "Accept-Encoding": "identity",
            "Content-Type": content_type,
            "User-Agent": _USER_AGENT,
        }
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = f"{self._api.configuration.host}{path}"
        if query:
            url += f"?{urlencode(query)}"
        answer = await self._api.rest_client.request(  # type: ignore[no-untyped-call]
            method, url, headers=headers, body=body, _request_timeout=self._timeout
        )
        async with answer.response as response:
            return response.status, await response.read(), response.headers


def _settled(configuration: Configuration) -> Configuration:
    """The same credentials, with the environment's proxy looked up once.

    aiohttp would look for it, and for ~/.netrc, before each request: two threads' turns each time.
    """
    settled = copy.copy(configuration)
    settled.client_session_kwargs = {"trust_env": False}
    if not settled.proxy:
        server = urlsplit(settled.host)
        if not proxy_bypass(server.hostname or ""):
            settled.proxy = getproxies().get(server.scheme)
    return settled


def _object(status: int, content: bytes) -> Object:
    try:
        decoded = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise UnavailableError(status, "BadAnswer", f"the API server's answer is no JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise UnavailableError(status, "BadAnswer", "the API server's answer is no object")
    return decoded


def _pairs(wanted: Mapping[str, str] | None, operator: str) -> list[str]:
    return [f"{key}{operator}{value}" for key, value in sorted((wanted or {}).items())]
