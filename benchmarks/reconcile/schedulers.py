"""Schedulers, played: for each scheduler's Pod a registry that knows what runs on the played nodes.

An engine counts as registered once its containers are ready, which is when its sidecar would register it.
Drain marks are kept. Nothing is ever in flight, so a drain ends as soon as it is marked.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web
from e2e.played_kubelet import PlayedNodes

from mooncake_operator.planning import ClusterNames, Port

CLUSTER_LABEL = "mooncake.io/cluster"
ROLE_LABEL = "mooncake.io/role"
ENGINES = frozenset({"prefill", "decode"})


class PlayedSchedulers:
    """Answers on the admin port at every address of this network namespace, for the Pod that has it."""

    def __init__(self, played: PlayedNodes) -> None:
        self._played = played
        self._draining: dict[str, str] = {}
        """Instance → uid of the Pod that was marked: its successor of the same name is a new life."""

    async def __aenter__(self) -> PlayedSchedulers:
        app = web.Application()
        app.router.add_get("/instances", self._list)
        app.router.add_post("/instances/{id}/drain", self._drain)
        app.router.add_delete("/instances/{id}/drain", self._undrain)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "0.0.0.0", ClusterNames().port("", Port.ADMIN)).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        cluster = self._cluster_of(request)
        views = []
        for pod, ready in self._played.pods():
            labels = pod["metadata"].get("labels") or {}
            if ready and labels.get(CLUSTER_LABEL) == cluster and labels.get(ROLE_LABEL) in ENGINES:
                views.append(self._view(pod, labels[ROLE_LABEL]))
        return web.json_response({"instances": views, "degraded": []})

    async def _drain(self, request: web.Request) -> web.Response:
        instance = request.match_info["id"]
        for pod, _ in self._played.pods():
            if pod["metadata"]["name"] == instance:
                self._draining[instance] = pod["metadata"]["uid"]
        return web.json_response({})

    async def _undrain(self, request: web.Request) -> web.Response:
        self._draining.pop(request.match_info["id"], None)
        return web.json_response({})

    def _view(self, pod: dict[str, Any], role: str) -> dict[str, Any]:
        name = pod["metadata"]["name"]
        state = "draining" if self._draining.get(name) == pod["metadata"]["uid"] else "ready"
        return {"id": name, "role": role, "state": state, "load": {"queued": 0, "batch": 0, "arriving": 0}}

    def _cluster_of(self, request: web.Request) -> str:
        assert request.transport is not None
        address = request.transport.get_extra_info("sockname")[0]
        for pod, _ in self._played.pods():
            if (pod.get("status") or {}).get("podIP") == address:
                return str(pod["metadata"]["labels"][CLUSTER_LABEL])
        raise web.HTTPNotFound
