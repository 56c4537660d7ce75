"""A client of the scheduler's admin API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from mooncakectl.addresses import bearer, checked_url, tls_to
from mooncakectl.admin.find import admin_token
from mooncakectl.console import CommandError

_TIMEOUT_S = 10.0


class AdminError(CommandError):
    """The scheduler did not answer, or refused; the message says what to do."""


class UnreachableError(AdminError):
    """The scheduler did not answer; another one may."""


class UnknownError(AdminError):
    """The scheduler answered that it knows no such thing."""


@asynccontextmanager
async def connected(
    urls: Sequence[str], *, timeout_s: float = _TIMEOUT_S
) -> AsyncIterator[list[AdminClient]]:
    """Clients of several schedulers' admin ports, closed at the end."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AdminClient(url, timeout_s=timeout_s)) for url in urls]


class AdminClient:
    """Questions to one scheduler; an async context manager."""

    def __init__(self, url: str, *, timeout_s: float = _TIMEOUT_S) -> None:
        """Prepare.

        Args:
            url: base URL of the admin port.
            timeout_s: for each answer, in wall seconds.
        """
        tls = tls_to(checked_url(url))
        self._url = url
        token = admin_token()
        headers = bearer(token, "MOONCAKE_ADMIN_TOKEN") if token else {}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout_s, trust_env=False, verify=tls or True
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def instances(self) -> dict[str, Any]:
        """All instances with state and load."""
        answer = await self._ask("GET", "/instances")
        listed = answer.get("instances")
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise AdminError(f"{self._url}/instances lists no instances: is this the admin port?")
        return answer

    async def stats(self) -> dict[str, Any]:
        """Counters and percentiles of the cluster."""
        return await self._ask("GET", "/stats")

    async def decision(self, request_id: str) -> dict[str, Any]:
        """Why a request went where it went; raises UnknownError when it is not known (any more)."""
        if not request_id:
            raise UnknownError("no id: write that of the answer's header x-request-id")
        missing = (
            f"no decision about request {request_id} is kept: it is too old, or was never made here;"
            " the id is that of the answer's header x-request-id, not the one in its body"
        )
        return await self._ask("GET", f"/decisions/{quote(request_id, safe='')}", missing=missing)

    async def drain(self, instance: str, *, wanted: bool = True) -> dict[str, Any]:
        """Mark an instance draining, or ready again."""
        path = f"/instances/{quote(instance, safe='')}/drain"
        missing = f"no instance {instance}: `mooncakectl status` lists them"
        return await self._ask("POST" if wanted else "DELETE", path, missing=missing)

    async def _ask(self, method: str, path: str, *, missing: str | None = None) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(
                f"no answer from the scheduler's admin port at {self._url}: {reason}"
            ) from error
        if answer.status_code == 404:
            raise UnknownError(missing or f"there is no {path} at {self._url}: is this the admin port?")
        if answer.status_code in (401, 403):
            raise AdminError(f"{self._url} wants a token: set MOONCAKE_ADMIN_TOKEN (a token, or @FILE)")
        if answer.is_error:
            raise AdminError(f"{method} {self._url}{path}: HTTP {answer.status_code}: {_detail(answer)}")
        try:
            document = answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise AdminError(f"{self._url}{path} answers no JSON object: is this the admin port?")
        return document


def _detail(answer: httpx.Response) -> str:
    """What the admin API says is wrong."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
