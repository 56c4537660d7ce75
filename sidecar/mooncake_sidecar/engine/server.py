"""The sidecar's HTTP: probes, metrics, drain."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Query, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from mooncake_sidecar.engine.drain import Drained, drain
from mooncake_sidecar.engine.metrics import SidecarMetrics
from mooncake_sidecar.engine.sidecar import Sidecar

STUCK_AFTER_BEATS = 30
"""Beats without a look at the engine after which the process is stuck and better restarted."""


def build_app(sidecar: Sidecar) -> FastAPI:
    """The application; its OpenAPI document stands at /openapi.json."""
    app = FastAPI(title="Mooncake engine sidecar", docs_url=None, redoc_url=None)
    registry = CollectorRegistry()
    registry.register(SidecarMetrics(sidecar))

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        """Whether this process works; says nothing of the engine."""
        age_s = time.monotonic() - sidecar.beaten_at
        stuck = age_s > STUCK_AFTER_BEATS * max(1.0, sidecar.config.heartbeat_s)
        return JSONResponse({"status": "stuck" if stuck else "ok"}, 503 if stuck else 200)

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """Whether the engine can be used through the schedulers, and what is missing if not."""
        missing = sidecar.ready
        return JSONResponse({"status": missing or "ok"}, 503 if missing else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/status")
    async def status() -> JSONResponse:
        """What the sidecar knows: for people, and for schedulers whose registry is away."""
        residency = sidecar.residency
        return JSONResponse(
            {
                "instance": sidecar.config.instance,
                "epoch": sidecar.instance.epoch if sidecar.instance else 0,
                "draining": sidecar.draining,
                "engine_answers": sidecar.engine_answers,
                "missing": sidecar.ready,
                "blocks": len(residency.mirror),
                "sequence": residency.sequence,
                "version": residency.version,
                "waiting_keys": residency.waiting_keys,
                "pool_blocks": sidecar.pool.blocks if sidecar.pool else 0,
                "shared_state_away": sidecar.shared_state_away,
            }
        )

    @app.post("/drain")
    async def start_drain(timeout_s: float | None = Query(default=None, gt=0)) -> JSONResponse:
        """Take the instance out of routing and answer when it is empty, or when the time is over (504)."""
        wanted_s = timeout_s or sidecar.config.drain_timeout_s
        outcome = await drain(sidecar, wanted_s)
        return JSONResponse({"outcome": outcome}, 504 if outcome is Drained.TIMEOUT else 200)

    return app


class Server(uvicorn.Server):
    """uvicorn without hands on the process's signals: these mean a drain here."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def build_server(sidecar: Sidecar) -> Server:
    """The server, on the address of the configuration."""
    listen = sidecar.config.listen
    return Server(
        uvicorn.Config(
            build_app(sidecar),
            host=listen.host,
            port=listen.port,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )
