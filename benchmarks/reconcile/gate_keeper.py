"""Opens readiness gates of Pods that no operator looks after, as soon as their containers are ready.

What a gate costs anybody: one more write of whoever opens it, and one more of the kubelet that notices.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, Self

from aiohttp import ClientError
from e2e.kube import Kube, KubeError
from e2e.played_kubelet import PlayedNodes

GATE = "bench.mooncake.io/open"
_AT_ONCE = 16
"""As many requests at a time as a pass of the operator makes."""
_LOOK_EVERY_S = 0.05


class GateKeeper:
    """Looks at the Pods of some namespaces, as an async context manager."""

    def __init__(self, kube: Kube, played: PlayedNodes, namespaces: frozenset[str]) -> None:
        self._kube = kube
        self._played = played
        self._namespaces = namespaces
        self._opened: set[str] = set()
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                for pod, ready in self._played.pods():
                    metadata = pod["metadata"]
                    if (
                        ready
                        and metadata["namespace"] in self._namespaces
                        and metadata["uid"] not in self._opened
                    ):
                        self._opened.add(metadata["uid"])
                        group.create_task(self._open(metadata))
                await asyncio.sleep(_LOOK_EVERY_S)

    async def _open(self, metadata: dict[str, Any]) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        gate = {"type": GATE, "status": "True", "reason": "Ready", "lastTransitionTime": stamp}
        body = {"metadata": {"uid": metadata["uid"]}, "status": {"conditions": [gate]}}
        place = (metadata["name"], body, metadata["namespace"])
        async with self._limit:
            try:
                await self._kube.patch("Pod", *place, how="strategic", subresource="status")
            except (KubeError, ClientError, TimeoutError):
                # A crowded server: looked at again in a moment, as any controller would.
                self._opened.discard(metadata["uid"])
