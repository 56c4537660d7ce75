"""The admin API: instances, decisions, drain, statistics, and the indexer calls of Mooncake's Conductor."""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Response
from fastapi.responses import JSONResponse

from mooncake_core.registry import InstanceState
from mooncake_scheduler.admin.guard import Guard
from mooncake_scheduler.admin.indexer import HashQuery, TokenQuery, answer_hashes, answer_tokens
from mooncake_scheduler.admin.views import decision_view, instance_views, stats_view
from mooncake_scheduler.gateway.auth import AdminToken
from mooncake_scheduler.gateway.services import Services

_DESCRIPTION = """What a scheduler knows and decides. Durations are model seconds where the cluster's time
scale is not 1. With an admin token configured, every path but health, readiness and metrics needs
`Authorization: Bearer <token>`."""


class Inspected(Protocol):
    """What the API looks at: the scheduler process."""

    services: Services
    admin_token: AdminToken

    def why_not_ready(self) -> str: ...

    def degradations(self) -> list[str]: ...

    def metrics_text(self) -> bytes: ...


def build_api(scheduler: Inspected) -> FastAPI:
    """The application of the admin port."""
    services = scheduler.services

    api = FastAPI(
        title="Mooncake scheduler",
        description=_DESCRIPTION,
        version="v1alpha1",
        docs_url=None,
        redoc_url=None,
    )
    api.add_middleware(Guard, token=scheduler.admin_token)

    @api.get("/instances", summary="All instances with state, load and conditions")
    async def instances() -> dict[str, Any]:
        return {
            "cluster": services.config.cluster,
            "model": services.config.model,
            "index": services.residency.mode,
            "degraded": scheduler.degradations(),
            "instances": instance_views(services),
        }

    @api.post("/instances/{instance_id}/drain", summary="Place nothing more there")
    async def drain(instance_id: str) -> dict[str, str]:
        return await mark(instance_id, InstanceState.DRAINING)

    @api.delete("/instances/{instance_id}/drain", summary="Use it again")
    async def undrain(instance_id: str) -> dict[str, str]:
        return await mark(instance_id, InstanceState.READY)

    async def mark(instance_id: str, state: InstanceState) -> dict[str, str]:
        if instance_id in services.roster.stores:
            raise HTTPException(409, f"{instance_id} is a KV cache pool: only engines can be drained")
        try:
            known = await services.roster.registry.mark(instance_id, state)
        except ConnectionError as error:
            raise HTTPException(503, "the registry is away: try again", {"Retry-After": "1"}) from error
        if not known:
            raise HTTPException(404, f"there is no instance {instance_id}: GET /instances lists them")
        await services.roster.refresh()
        return {"id": instance_id, "state": state.value}

    @api.get("/decisions", summary="The last decisions, newest first")
    async def decisions(limit: int = 50) -> dict[str, Any]:
        latest = services.decisions.latest(max(1, min(limit, 500)))
        return {"decisions": [decision_view(each) for each in latest]}

    @api.get(
        "/decisions/{request_id}",
        summary="Why a request went where it went: who was considered, predicted against measured",
    )
    async def decision(request_id: str) -> dict[str, Any]:
        found = services.decisions.get(request_id)
        if found is None:
            raise HTTPException(
                404, f"no decision on {request_id} is known: it is too old, or another scheduler's"
            )
        return decision_view(found, explain=services.placer.explained)

    @api.get("/stats", summary="Counters and percentiles of this scheduler")
    async def stats() -> dict[str, Any]:
        return stats_view(services, scheduler.degradations())

    @api.post("/query", summary="Cache hits of a prompt by its token ids (RFC 1403)")
    async def query(asked: TokenQuery) -> dict[str, Any]:
        return await answer_tokens(asked, services)

    @api.post("/query_by_hash", summary="Cache hits of a prompt by block hashes")
    async def query_by_hash(asked: HashQuery) -> dict[str, Any]:
        return await answer_hashes(asked, services)

    @api.get("/healthz", summary="The process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/readyz", summary="Requests can be served")
    async def readyz() -> JSONResponse:
        why_not = scheduler.why_not_ready()
        return JSONResponse({"status": why_not or "ready"}, status_code=503 if why_not else 200)

    @api.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(scheduler.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api
