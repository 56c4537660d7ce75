"""One generation request on its way through the engine: tokens to text, text to the client."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from mooncake_simulator.engine.core import Engine
from mooncake_simulator.engine.http_server import Exchange
from mooncake_simulator.engine.openai_answers import DONE, StreamWriter, event, whole_answer
from mooncake_simulator.engine.openai_requests import ApiError, Generation
from mooncake_simulator.engine.options import VLLM_VERSION
from mooncake_simulator.engine.output import output_of
from mooncake_simulator.engine.sequence import Emission, Limits, Sequence, Times
from mooncake_simulator.engine.tokens import TextCodec


def engine_error() -> ApiError:
    """What a client gets when its request failed inside the engine."""
    return ApiError(500, "InternalServerError", "Internal server error")


class StopStrings:
    """Holds back text that may be the beginning of a stop string, and finds the first that is complete."""

    def __init__(self, stops: list[str], *, keep: bool) -> None:
        self._stops = stops
        self._keep = keep
        self._held = ""
        self._hold = max((len(stop) for stop in stops), default=1) - 1

    def push(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that ends it (`may_stop`: enough tokens are there)."""
        if not self._stops:
            return text, None
        pending = self._held + text
        found = [(pending.find(stop), stop) for stop in self._stops if may_stop and stop in pending]
        if found:
            at, stop = min(found)
            self._held = ""
            return pending[: at + len(stop) if self._keep else at], stop
        cut = len(pending) - self._hold
        if cut <= 0:
            self._held = pending
            return "", None
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back, once no more comes."""
        held, self._held = self._held, ""
        return held


class Answer:
    """Takes a sequence's tokens and writes the answer."""

    def __init__(self, engine: Engine, codec: TextCodec, request: Generation, exchange: Exchange) -> None:
        self._engine = engine
        self._codec = codec
        self._request = request
        self._exchange = exchange
        self._detokenize = codec.stream()
        self._stops = StopStrings(request.stop, keep=request.stop_in_output)
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._fingerprint = (
            f"vllm-{VLLM_VERSION}-{hashlib.sha256(engine.options.model.encode()).hexdigest()[:8]}"
        )
        self._writer = StreamWriter(request, self._fingerprint) if request.stream else None
        self._cached_remotely = _cached_remotely(request.transfer)
        self._break_after = engine.faults.break_stream_after_tokens
        self._sequence = Sequence(
            # Clients may repeat ids; inside the engine vLLM makes them unique in this form.
            id=f"{request.id}-0-{secrets.token_hex(4)}",
            tokens=list(request.prompt),
            limits=Limits(
                max_tokens=request.max_tokens,
                min_tokens=request.min_tokens,
                ignore_eos=request.ignore_eos,
                eos_token=codec.eos_token,
                stop_tokens=request.stop_token_ids,
            ),
            next_token=output_of(
                request.prompt,
                seed=request.seed,
                vocabulary=codec.output_vocabulary,
                eos_token=codec.eos_token,
                mean_output_tokens=engine.options.mean_output_tokens,
                eos_after=engine.faults.eos_after_tokens,
            ),
            times=Times(arrived_s=engine.clock.now_s()),
            sink=self.take,
            salt=request.salt,
            transfer=request.transfer,
        )
        exchange.on_disconnect = lambda: engine.finish(self._sequence, "abort")

    @property
    def sequence(self) -> Sequence:
        """The request as the scheduler knows it."""
        return self._sequence

    def begin(self) -> None:
        """Hand the request to the engine."""
        if self._writer is not None:
            self._exchange.start_stream("text/event-stream; charset=utf-8")
            if self._request.echo and self._request.prompt_text:
                self._text.append(self._request.prompt_text)
        self._engine.submit(self._sequence)

    def take(self, emission: Emission) -> None:
        """One token, or the end, or both."""
        if self._exchange.ended.is_set():
            return
        reason, stop_reason = emission.finish_reason, emission.stop_reason
        if reason == "error":
            self._fail(engine_error())
            return
        text = ""
        if emission.token is not None:
            self._tokens.append(emission.token)
            # As vLLM: a token that stops is counted and reported, its text is not.
            if reason != "stop":
                text = self._detokenize(emission.token)
        text, stop = self._stops.push(text, may_stop=len(self._tokens) > self._request.min_tokens)
        if stop is not None:
            if reason is None:
                self._engine.finish(self._sequence, "stop")
            reason, stop_reason = "stop", stop
        elif reason is not None:
            text += self._stops.flush()
        if self._writer is None:
            self._text.append(text)
            if reason is not None:
                self._answer_whole(reason, stop_reason)
        else:
            self._stream(self._writer, emission.token, text, reason, stop_reason)

    def _stream(
        self,
        writer: StreamWriter,
        token: int | None,
        text: str,
        reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        tokens = [] if token is None else [token]
        if reason is None:
            data = writer.token("".join(self._text) + text, tokens, len(self._tokens))
            self._text.clear()
            self._exchange.write(data)
            if self._break_after is not None and len(self._tokens) >= self._break_after:
                self._exchange.drop()
                self._engine.finish(self._sequence, "abort")
            return
        data = writer.last("".join(self._text) + text, tokens, len(self._tokens), reason, stop_reason)
        if self._request.include_usage:
            data += writer.usage(len(self._tokens), self._cached())
        self._exchange.write(data + DONE)
        self._exchange.end_stream()

    def _answer_whole(self, reason: str, stop_reason: int | str | None) -> None:
        document = whole_answer(
            self._request,
            "".join(self._text),
            self._tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            cached=self._cached(),
            fingerprint=self._fingerprint,
            transfer=self._sequence.transfer_answer,
        )
        self._exchange.json(document)

    def _fail(self, error: ApiError) -> None:
        if self._exchange.started:
            self._exchange.write(event(error.body()) + DONE)
            self._exchange.end_stream()
        else:
            self._exchange.json(error.body(), error.status)

    def _cached(self) -> int | None:
        if not self._engine.options.prompt_tokens_details:
            return None
        if self._cached_remotely is not None:
            return self._cached_remotely
        return max(0, self._sequence.cached_tokens)


def _cached_remotely(transfer: dict[str, Any] | None) -> int | None:
    """What the prefill side had cached: vLLM's decode side reports that, where the router hands it on."""
    if not transfer or not transfer.get("do_remote_prefill"):
        return None
    cached = transfer.get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) else None
