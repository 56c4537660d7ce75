"""The serving port: which request goes where, who may come in, and who is being served."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from mooncake_scheduler.gateway.auth import ApiKeys
from mooncake_scheduler.gateway.decisions import Decision
from mooncake_scheduler.gateway.errors import ErrorAnswer
from mooncake_scheduler.gateway.flow import ClientLeftError, Flow
from mooncake_scheduler.gateway.http1 import Exchange
from mooncake_scheduler.gateway.http1.heads import JSON, TEXT, header
from mooncake_scheduler.gateway.ids import kept
from mooncake_scheduler.gateway.job import Job
from mooncake_scheduler.gateway.request import Request
from mooncake_scheduler.gateway.services import Services

_log = structlog.get_logger(__name__)

_SERVED = frozenset({b"/v1/completions", b"/v1/chat/completions"})
_OPEN = frozenset({b"/health", b"/ready", b"/metrics"})
_GETS = _OPEN | {b"/v1/models"}


class DataPath:
    """Handles the exchanges of the serving port.

    Args:
        services: the parts of the gateway.
        keys: who may come in.
        ready: whether requests can be served, and why not.
        metrics_text: the exposition of all metrics.
    """

    def __init__(
        self, services: Services, keys: ApiKeys, ready: Callable[[], str], metrics_text: Callable[[], bytes]
    ) -> None:
        self._services = services
        self._keys = keys
        self._ready = ready
        self._metrics_text = metrics_text
        self.flows: set[Flow] = set()
        """Requests being served."""

    # -- Handler

    def head(self, exchange: Exchange) -> bool:
        try:
            if exchange.path in _SERVED:
                self._want(exchange, b"POST")
                exchange.caller = self._keys.caller(exchange.headers)
                if exchange.headers.get(b"content-encoding", b"identity").lower() != b"identity":
                    raise ErrorAnswer(415, "send the body as it is: no Content-Encoding is taken")
                return False
            if exchange.path in _GETS:
                self._want(exchange, b"GET", b"HEAD")
                if exchange.path not in _OPEN:
                    self._keys.caller(exchange.headers)
                return False
            path = exchange.path.decode("ascii", "replace")
            raise ErrorAnswer(404, f"there is no {path} here", code="not_found")
        except ErrorAnswer as answer:
            sent = kept(exchange.headers.get(b"x-request-id"))
            lines = answer.header_lines() + (header(b"x-request-id", sent.encode()) if sent else b"")
            exchange.respond(answer.status, answer.body(), JSON, lines)
            return True

    def request(self, exchange: Exchange) -> None:
        if exchange.path in _SERVED:
            self._serve(exchange)
        elif exchange.path == b"/v1/models":
            exchange.respond(200, self._models())
        elif exchange.path == b"/metrics":
            exchange.respond(200, self._metrics_text(), b"text/plain; version=0.0.4; charset=utf-8")
        elif exchange.path == b"/ready":
            why_not = self._ready()
            exchange.respond(503 if why_not else 200, (why_not or "ready").encode() + b"\n", TEXT)
        else:
            exchange.respond(200, b"ok\n", TEXT)

    # -- serving

    def _serve(self, exchange: Exchange) -> None:
        services = self._services
        engine_id = services.ids.new()
        request_id = kept(exchange.headers.get(b"x-request-id")) or engine_id
        caller = exchange.caller
        job = Job(
            exchange=exchange,
            caller=caller,
            request_id=request_id,
            engine_id=engine_id,
            head=b"x-request-id: %b\r\n" % request_id.encode(),
            decision=Decision(request_id, services.clock.now_s(), caller.tenant, exchange.path.decode()),
            total_s=time.monotonic() + services.config.request_timeout_s,
        )
        flow = job.flow = Flow(Request(services, job).run(), self.flows.discard, _escaped)
        exchange.on_left = lambda: flow.interrupt(ClientLeftError())
        self.flows.add(flow)
        flow.start()

    def expire(self, now_s: float) -> None:
        """Interrupt requests whose present phase took too long; call every few ten milliseconds."""
        for flow in [flow for flow in self.flows if flow.deadline_s < now_s]:
            flow.expire(now_s)

    def _models(self) -> bytes:
        config = self._services.config
        lengths = [m.instance.max_model_len_tokens for m in self._services.roster.members.values()]
        model: dict[str, object] = {
            "id": config.model, "object": "model", "created": 0, "owned_by": "mooncake", "root": config.model,
            "parent": None, "max_model_len": min((n for n in lengths if n), default=None),
        }  # fmt: skip
        if config.time_scale != 1:
            model["mooncake"] = {"time_scale": config.time_scale}
        return msgspec.json.encode({"object": "list", "data": [model]})

    @staticmethod
    def _want(exchange: Exchange, *methods: bytes) -> None:
        if exchange.method not in methods:
            wanted = " or ".join(method.decode() for method in methods)
            path = exchange.path.decode("ascii", "replace")
            raise ErrorAnswer(
                405, f"{path} takes {wanted}", code="method_not_allowed", allow=b", ".join(methods)
            )


def _escaped(error: BaseException) -> None:
    _log.error("an error escaped a request", exc_info=error)
