"""What the schedulers of a cluster know of its instances, and how they are told to spare one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import structlog

from mooncake_operator.kube.resources import Object, is_terminating, name_of
from mooncake_operator.planning import ClusterNames, Port
from mooncake_operator.planning.manifests.objects import is_ready
from mooncake_operator.planning.observed import Registration
from mooncake_operator.planning.reading import registrations

_log = structlog.get_logger()
_ASKED = 3


class SchedulersAwayError(Exception):
    """No scheduler of the cluster answers."""


@dataclass(frozen=True, slots=True)
class View:
    """What the schedulers say of the instances."""

    registry: Mapping[str, Registration] | None = None
    """By id; None = no scheduler can tell, from which nothing follows."""
    degraded: tuple[str, ...] = ()
    """What does not work as it should, in a scheduler's words."""
    silence: str = ""
    """Why there is no answer though there are schedulers that are ready; empty = there is, or are none."""


class Schedulers:
    """Speaks to the admin ports of clusters' schedulers; any one of a cluster speaks for all."""

    def __init__(self, *, port: int | None = None, timeout_s: float = 2.0) -> None:
        """Take the admin port; None = the one that Pods in a cluster have."""
        self._port = port or ClusterNames().port("", Port.ADMIN)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def view(self, pods: Iterable[Object], token: str) -> View:
        """What a scheduler says of the instances; any that knows speaks for all.

        Args:
            pods: the schedulers' Pods, and any others.
            token: of the admin port.
        """
        why, degraded = "", tuple[str, ...]()
        pods = list(pods)
        ready = addresses(pods)
        for address in _running(pods)[:_ASKED]:
            try:
                answer = await self._ask("GET", f"{self._url(address)}/instances", token)
                degraded = tuple(map(str, answer.get("degraded") or ()))
                # A scheduler that has lost sight of the registry repeats what it knew last.
                if not degraded:
                    return View(registrations(answer["instances"]))
            except (SchedulersAwayError, KeyError, ValueError, TypeError, AttributeError) as error:
                _log.debug("a scheduler does not tell", address=address, error=str(error))
                why = f"{address}: {error}" if address in ready else why
        return View(None, degraded, "" if degraded else why)

    async def statistics(self, pods: Iterable[Object], token: str) -> list[dict[str, Any]]:
        """`GET /stats` of all schedulers that answer, asked at the same time."""

        async def one(address: str) -> dict[str, Any] | None:
            try:
                return await self._ask("GET", f"{self._url(address)}/stats", token)
            except SchedulersAwayError as error:
                _log.debug("a scheduler tells no statistics", address=address, error=str(error))
                return None

        answers = await asyncio.gather(*map(one, addresses(pods)))
        return [answer for answer in answers if answer is not None]

    async def drain(self, pods: Sequence[Object], token: str, instance: str, *, end: bool = False) -> None:
        """Let nothing more be placed on an instance, or let it be used again.

        Raises:
            SchedulersAwayError: none takes the wish.
        """
        why = "there is none that runs"
        for address in _running(pods)[:_ASKED]:
            try:
                url = f"{self._url(address)}/instances/{instance}/drain"
                await self._ask("DELETE" if end else "POST", url, token)
                return
            except SchedulersAwayError as error:
                why = str(error)
        raise SchedulersAwayError(f"no scheduler takes the drain of {instance}: {why}")

    def _url(self, address: str) -> str:
        return f"http://[{address}]:{self._port}" if ":" in address else f"http://{address}:{self._port}"

    async def _ask(self, method: str, url: str, token: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        try:
            # A session for each question: they are few, and Pods come and go.
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.request(method, url, headers=headers) as answer,
            ):
                body = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SchedulersAwayError(str(error) or type(error).__name__) from error
        if answer.status == 404 and method != "GET":
            # The instance has left: nothing will be placed on it.
            return {}
        if answer.status != 200:
            raise SchedulersAwayError(f"HTTP {answer.status}")
        try:
            decoded = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise SchedulersAwayError(f"no JSON: {error}") from error
        return decoded if isinstance(decoded, dict) else {}


def addresses(pods: Iterable[Object]) -> list[str]:
    """Addresses of ready schedulers, in a fixed order."""
    return [str(pod["status"]["podIP"]) for pod in _schedulers(pods) if is_ready(pod)]


def _running(pods: Iterable[Object]) -> list[str]:
    """Addresses of all that may answer, the ready ones first.

    A scheduler that has no decode instance is not ready, and yet it is what says that the last one is empty.
    """
    found = sorted(_schedulers(pods), key=lambda pod: not is_ready(pod))
    return [str(pod["status"]["podIP"]) for pod in found if pod["status"].get("phase") == "Running"]


def _schedulers(pods: Iterable[Object]) -> list[Object]:
    found = [
        pod
        for pod in pods
        if (pod["metadata"].get("labels") or {}).get("mooncake.io/role") == "scheduler"
        and (pod.get("status") or {}).get("podIP")
        and not is_terminating(pod)
    ]
    return sorted(found, key=name_of)
