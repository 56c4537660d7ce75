"""The engine's HTTP endpoints: vLLM's, and `/simulator/…` for tests."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from mooncake_simulator.engine.answering import Answer, engine_error
from mooncake_simulator.engine.core import Engine
from mooncake_simulator.engine.faults import FaultError
from mooncake_simulator.engine.hashing import external_hash
from mooncake_simulator.engine.http_server import Exchange, Request
from mooncake_simulator.engine.metrics import CONTENT_TYPE
from mooncake_simulator.engine.openai_requests import (
    ApiError,
    RequestReader,
    bad_request,
    decode_body,
    transfer_params,
)
from mooncake_simulator.engine.options import VLLM_VERSION
from mooncake_simulator.engine.tokens import TextCodec

LOG = logging.getLogger(__name__)

_Route = Callable[[Request, Exchange], None]


class App:
    """Routes requests of one engine."""

    def __init__(self, engine: Engine, codec: TextCodec) -> None:
        self._engine = engine
        self._codec = codec
        self._reader = RequestReader(engine.options, codec)
        self._created = int(time.time())
        self.draining = False
        self._routes: dict[tuple[str, str], _Route] = {
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/chat/completions"): self._chat,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): lambda _, exchange: exchange.json({"version": VLLM_VERSION}),
            ("GET", "/load"): self._load,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/kv_event_sources"): self._event_sources,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
            ("GET", "/simulator/state"): self._state,
            ("GET", "/simulator/blocks"): self._blocks,
            ("GET", "/simulator/faults"): self._show_faults,
            ("POST", "/simulator/faults"): self._set_faults,
        }
        self._paths = {path for _, path in self._routes}

    async def __call__(self, request: Request, exchange: Exchange) -> None:
        """Answer one request."""
        route = self._routes.get((request.method, request.path))
        if route is None:
            known = request.path in self._paths
            exchange.json({"detail": "Method Not Allowed" if known else "Not Found"}, 405 if known else 404)
            return
        try:
            route(request, exchange)
        except ApiError as error:
            exchange.json(error.body(), error.status, error.headers)

    def _completions(self, request: Request, exchange: Exchange) -> None:
        self._generate(request, exchange, chat=False)

    def _chat(self, request: Request, exchange: Exchange) -> None:
        self._generate(request, exchange, chat=True)

    def _generate(self, request: Request, exchange: Exchange, *, chat: bool) -> None:
        engine = self._engine
        body = decode_body(request.body)
        self._fault(body)
        if engine.faults.hang:
            return
        read = self._reader.chat if chat else self._reader.completion
        generation = read(body, request.headers.get("x-request-id"))
        # vLLM that was told to go keeps its socket open and fails what comes (engines.md §8, Drain).
        if self.draining or engine.dead:
            raise engine_error()
        self._admit(len(generation.prompt))
        Answer(engine, self._codec, generation, exchange).begin()

    def _fault(self, body: dict[str, Any]) -> None:
        faults = self._engine.faults
        if faults.status_503_retry_after is not None:
            raise ApiError(
                503,
                "ServiceUnavailableError",
                "The engine is currently busy and cannot accept new requests.",
                headers={"retry-after": f"{faults.status_503_retry_after:g}"},
            )
        prefill = (transfer_params(body) or {}).get("do_remote_decode")
        if faults.take("status_500") or (prefill and faults.take("fail_prefill")):
            raise engine_error()

    def _admit(self, prompt_tokens: int) -> None:
        engine, options = self._engine, self._engine.options
        scheduler = engine.scheduler
        most = options.max_num_queued_reqs
        if most is not None and scheduler.unfinished + 1 > most:
            engine.metrics.rejections["max_num_queued_reqs"].inc()
            raise ApiError(
                503,
                "Service Unavailable",
                "The engine is currently busy and cannot accept new requests. "
                "Please try again later or on a different instance.",
            )
        most = options.max_num_queued_tokens
        if most is not None and scheduler.prefilling_tokens >= most:
            engine.metrics.rejections["max_num_queued_tokens"].inc()
            raise ApiError(
                503,
                "Service Unavailable",
                "The engine has reached its prefill token backlog limit. "
                "Please try again later or on a different instance.",
            )

    def _models(self, _: Request, exchange: Exchange) -> None:
        options = self._engine.options
        cards = []
        for name in options.served_model_names:
            permission = {
                "id": f"modelperm-{uuid.uuid4().hex}",
                "object": "model_permission",
                "created": self._created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
            card: dict[str, Any] = {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": options.model,
                "parent": None,
                "max_model_len": options.max_model_len,
                "permission": [permission],
            }
            if options.time_scale != 1:
                card["mooncake"] = {"time_scale": options.time_scale}
            cards.append(card)
        exchange.json({"object": "list", "data": cards})

    def _health(self, _: Request, exchange: Exchange) -> None:
        healthy = not (self._engine.dead or self._engine.faults.unhealthy)
        exchange.respond(b"", 200 if healthy else 503)

    def _metrics(self, _: Request, exchange: Exchange) -> None:
        engine = self._engine
        text = engine.metrics.render(engine.scheduler) if engine.options.log_stats else b""
        exchange.respond(text, 200, CONTENT_TYPE)

    def _load(self, _: Request, exchange: Exchange) -> None:
        engine = self._engine
        exchange.json({"server_load": engine.scheduler.unfinished if engine.options.load_tracking else 0})

    def _tokenize(self, request: Request, exchange: Exchange) -> None:
        body = decode_body(request.body)
        self._reader.check_model(body)
        if "messages" in body:
            tokens, _ = self._reader.chat_prompt(body)
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise bad_request("prompt: Input should be a valid string", "prompt")
            tokens = self._codec.encode(prompt, special=bool(body.get("add_special_tokens", True)))
        texts = [self._codec.token_text(token) for token in tokens] if body.get("return_token_strs") else None
        exchange.json(
            {
                "count": len(tokens),
                "max_model_len": self._engine.options.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    def _detokenize(self, request: Request, exchange: Exchange) -> None:
        body = decode_body(request.body)
        self._reader.check_model(body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(one) is int and one >= 0 for one in tokens):
            raise bad_request("tokens: Input should be a list of token ids", "tokens")
        exchange.json({"prompt": self._codec.decode(tokens)})

    def _event_sources(self, _: Request, exchange: Exchange) -> None:
        events = self._engine.options.events
        source = {
            "enable_kv_cache_events": events.enabled,
            "publisher": "zmq" if events.enabled else "null",
            "endpoint": self._engine.publisher.endpoint,
            "replay_endpoint": events.replay_endpoint,
            "buffer_steps": events.buffer_steps,
            "hwm": events.hwm,
            "max_queue_size": events.max_queue_size,
            "topic": events.topic,
        }
        exchange.json({"0": source} if events.enabled else {})

    def _reset_prefix_cache(self, _: Request, exchange: Exchange) -> None:
        # Its event goes out with the next step, as in vLLM (engines.md §2).
        if not self._engine.scheduler.pool.clear():
            LOG.warning("prefix cache not reset: blocks are in use")
        exchange.respond(b"", 200)

    def _state(self, _: Request, exchange: Exchange) -> None:
        engine = self._engine
        scheduler = engine.scheduler
        exchange.json(
            {
                "model_time_s": engine.clock.now_s(),
                "steps": engine.steps,
                "running": len(scheduler.running),
                "waiting": len(scheduler.waiting) + len(scheduler.ready),
                "loading": len(scheduler.loading),
                "held": len(scheduler.held),
                "blocks": scheduler.pool.total_blocks - 1,
                "free_blocks": scheduler.pool.free_blocks,
                "next_event_sequence": engine.publisher.next_sequence,
                "draining": self.draining,
            }
        )

    def _blocks(self, _: Request, exchange: Exchange) -> None:
        """The prefix cache: engine hashes as events give them, and the keys the index knows the blocks by."""
        engine = self._engine
        as_int = engine.options.events.hashes_as_int
        hashes = []
        for block_hash in engine.scheduler.pool.cached_hashes():
            name = external_hash(block_hash, as_int=as_int)
            hashes.append(name.hex() if isinstance(name, bytes) else name)
        keys = engine.scheduler.pool.cached_keys()
        exchange.json(
            {"block_size": engine.options.block_size, "hashes": sorted(hashes), "keys": sorted(keys)}
        )

    def _show_faults(self, _: Request, exchange: Exchange) -> None:
        exchange.json(self._engine.faults)

    def _set_faults(self, request: Request, exchange: Exchange) -> None:
        try:
            self._engine.faults.update(decode_body(request.body))
        except FaultError as error:
            raise bad_request(f"faults: {error}") from error
        self._engine.wake()
        exchange.json(self._engine.faults)
