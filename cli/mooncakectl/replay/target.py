"""The server under replay: where it is, which model it serves, and whether it keeps simulated time."""

from __future__ import annotations

import ssl
from typing import Any, NamedTuple

import httpx

from mooncakectl.addresses import bearer, checked_url, tls_to
from mooncakectl.replay.exchange import Endpoint


class TargetError(Exception):
    """The server cannot be used; the message says why and what to do."""


class Target(NamedTuple):
    """A server that answered."""

    endpoint: Endpoint
    authority: str
    """For the Host header."""
    path: str
    """Of the completions call."""
    model: str
    time_scale: float
    """Model seconds that pass in one wall second."""
    api_key: str | None

    def completion(self, request_id: str, body: list[bytes]) -> list[bytes]:
        """A whole HTTP request for a completion."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.authority}\r\nContent-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nConnection: close\r\nX-Request-Id: {request_id}\r\n"
            f"Content-Length: {sum(map(len, body))}\r\n"
        )
        if self.api_key:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return [f"{head}\r\n".encode(), *body]


async def find_target(url: str, model: str | None, api_key: str | None, timeout_s: float = 10.0) -> Target:
    """Ask a server for its models.

    Args:
        url: its base URL, with or without the final /v1.
        model: which model to use; None takes the first one it serves.
        api_key: bearer key, where it wants one.
        timeout_s: wall seconds to wait for the answer.

    Raises:
        CommandError: the URL or the key cannot be.
        TargetError: there is no such server or model.
    """
    parts = checked_url(url)
    host = parts.hostname or ""
    base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
    tls = tls_to(parts)
    models = await _models(f"{parts.scheme}://{parts.netloc}{base}/models", tls, api_key, timeout_s)
    entry = _choose(models, model, url)
    return Target(
        endpoint=Endpoint(host, parts.port or (443 if tls else 80), tls),
        authority=parts.netloc.rpartition("@")[2],
        path=f"{base}/completions",
        model=str(entry["id"]),
        time_scale=_time_scale(entry),
        api_key=api_key,
    )


async def _models(
    url: str, tls: ssl.SSLContext | None, api_key: str | None, timeout_s: float
) -> list[dict[str, Any]]:
    headers = bearer(api_key, "--api-key") if api_key else {}
    try:
        # As the requests that follow: to the server itself, whatever proxy the environment names.
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False, verify=tls or True) as client:
            response = await client.get(url, headers=headers)
    except httpx.HTTPError as error:
        raise TargetError(
            f"{url}: {error or type(error).__name__}; is a server running there (mooncakectl up)?"
        ) from None
    if response.status_code == 401:
        raise TargetError(f"{url}: 401; the server wants a key: --api-key KEY")
    if response.status_code != 200:
        raise TargetError(f"{url}: {response.status_code} {response.text[:200]}")
    try:
        data = response.json()["data"]
        return [entry for entry in data if isinstance(entry["id"], str)]
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"{url}: the answer is not an OpenAI list of models") from None


def _choose(models: list[dict[str, Any]], model: str | None, url: str) -> dict[str, Any]:
    for entry in models:
        if model is None or entry["id"] == model:
            return entry
    served = ", ".join(entry["id"] for entry in models) or "none"
    raise TargetError(f"{url} does not serve {model or 'any model'}; it serves {served}")


def _time_scale(entry: dict[str, Any]) -> float:
    extension = entry.get("mooncake")
    scale = extension.get("time_scale", 1.0) if isinstance(extension, dict) else 1.0
    return float(scale) if isinstance(scale, int | float) and scale > 0 else 1.0
