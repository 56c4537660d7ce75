"""One scripted exchange with a prefill and a decode engine, and what a router can see of it.

The same script runs against vLLM and against the simulated engine. What comes back is reduced to *facts*:
lines such as `completion.body.usage.prompt_tokens: int`, in which ids, times and generated text are replaced
by their types. Two engines behave alike towards a router when their facts are the same.
"""

from __future__ import annotations

import json
import random
import re
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

# Values that belong to the protocol; every other string becomes its type.
WORDS = {
    "text_completion", "chat.completion", "chat.completion.chunk", "list", "model", "assistant", "user",
    "tiny", "length", "stop", "GPU", "BlockStored", "BlockRemoved", "AllBlocksCleared", "full_attention",
    "LOCAL", "BadRequestError", "NotFoundError",
}  # fmt: skip
HEADERS = ("content-type", "transfer-encoding", "retry-after")


@dataclass(frozen=True)
class EnginePair:
    """Where the engines under the script listen."""

    prefill_url: str
    decode_url: str
    bootstrap_url: str
    events_endpoint: str
    replay_endpoint: str


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


def call(
    url: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str | None = None
) -> Answer:
    """One HTTP exchange; error statuses are answers too."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"content-type": "application/json", **(headers or {})}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Answer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())


def facts_of(pair: EnginePair, model: str = "tiny") -> set[str]:
    """Run the script; the facts of every step."""
    facts: set[str] = set()
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(pair.events_endpoint)
    time.sleep(0.5)
    try:
        for name, answer in _http_steps(pair, model):
            facts |= set(answer_facts(name, answer))
        facts |= set(_event_facts(subscriber))
        facts |= set(_replay_facts(context, pair.replay_endpoint))
        facts |= set(_metric_facts("metrics.prefill", call(f"{pair.prefill_url}/metrics").body.decode()))
    finally:
        subscriber.close(0)
        context.term()
    return facts


def _prompt(number: int, count: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(10, 390) for _ in range(count)]


def _http_steps(pair: EnginePair, model: str) -> Iterator[tuple[str, Answer]]:
    prefill, decode = pair.prefill_url, pair.decode_url
    completions = f"{prefill}/v1/completions"
    plain = {
        "model": model,
        "prompt": _prompt(100, 200),
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    chat = {
        "model": model, "messages": [{"role": "user", "content": "a question"}], "max_tokens": 4,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    yield "health", call(f"{prefill}/health")
    yield "models", call(f"{prefill}/v1/models")
    yield "version", call(f"{prefill}/version")
    yield "load", call(f"{prefill}/load")
    yield "kv_event_sources", call(f"{prefill}/kv_event_sources")
    yield "tokenize", call(f"{prefill}/tokenize", {"model": model, "prompt": "a question"})
    yield "tokenize_chat", call(f"{prefill}/tokenize", {"model": model, "messages": chat["messages"]})
    yield "completion", call(completions, plain)
    yield "completion_again", call(completions, plain)
    yield "completion_text", call(completions, {**plain, "prompt": "a question"})
    yield "completion_ids", call(completions, {**plain, "return_token_ids": True})
    yield "stream", call(completions, {**plain, "stream": True})
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield "stream_usage", call(completions, {**plain, **with_usage})
    yield "chat", call(f"{prefill}/v1/chat/completions", chat)
    yield "chat_stream", call(f"{prefill}/v1/chat/completions", {**chat, **with_usage})
    yield "request_id", call(completions, plain, headers={"X-Request-Id": "mine"})
    yield "not_json", call(completions, b"{")
    yield "unknown_model", call(completions, {**plain, "model": "nobody"})
    yield "too_long", call(completions, {**plain, "prompt": _prompt(101, 4000)})
    yield "negative", call(completions, {**plain, "max_tokens": -1})
    yield "min_above_max", call(completions, {**plain, "min_tokens": 9})
    yield "no_prompt", call(completions, {"model": model, "max_tokens": 1})
    yield "not_found", call(f"{prefill}/nowhere")
    yield "wrong_method", call(completions, method="GET")
    bootstrap = call(f"{pair.bootstrap_url}/query")
    yield "bootstrap", bootstrap
    engine_id = bootstrap.json()["0"]["engine_id"]
    first = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-exchange"}
    prompt = {**plain, "prompt": _prompt(102, 100)}
    yield "prefill_leg", call(completions, {**prompt, "max_tokens": 1, "kv_transfer_params": first})
    second = {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "xfer-exchange",
        "remote_engine_id": engine_id, "remote_bootstrap_addr": pair.bootstrap_url,
    }  # fmt: skip
    decode_completions = f"{decode}/v1/completions"
    yield "decode_leg", call(decode_completions, {**prompt, "kv_transfer_params": second, **with_usage})
    for number in range(8):
        # More than the cache holds, so that the oldest blocks have to go.
        yield "filling", call(completions, {**plain, "prompt": _prompt(number, 1500), "max_tokens": 1})
    unknown = {**second, "transfer_id": "xfer-none", "remote_engine_id": "nobody"}
    yield "decode_of_unknown_engine", call(decode_completions, {**plain, "kv_transfer_params": unknown})


def answer_facts(name: str, answer: Answer) -> Iterator[str]:
    """The facts of one answer."""
    yield f"{name}.status: {answer.status}"
    for header in HEADERS:
        if header in answer.headers:
            yield f"{name}.header.{header}: {answer.headers[header].split(';')[0]}"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        yield from _stream_facts(name, answer.body.decode())
    elif answer.headers.get("content-type", "").startswith("application/json"):
        yield from _shape(f"{name}.body", answer.json())


def _stream_facts(name: str, text: str) -> Iterator[str]:
    events = [event for event in text.split("\n\n") if event]
    yield f"{name}.ends: {events[-1]}"
    documents = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    # A busy engine puts several tokens into one chunk, all of them into the first at worst: how many chunks
    # there are, and so whether the first is also the one that says why the text ends, is no fact.
    yield f"{name}.has_text: {any(d['choices'] for d in documents)}"
    for place, chunks in (("first", documents[:1]), ("any", documents), ("last", documents[-1:])):
        for fact in (fact for chunk in chunks for fact in _shape(f"{name}.{place}", chunk)):
            ends, goes_on = ".finish_reason:" in fact, fact.endswith(".finish_reason: null")
            if not goes_on and not (ends and place == "first"):
                yield fact


def _shape(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            named = "<id>" if re.fullmatch(r"[0-9a-f-]{36}", key) else key
            yield from _shape(f"{path}.{named}", inner)
    elif isinstance(value, list):
        yield f"{path}: list"
        for inner in value[:50]:
            yield from _shape(f"{path}[]", inner)
    elif isinstance(value, str):
        yield f"{path}: {value if value in WORDS else 'str'}"
    elif isinstance(value, bool) or value is None:
        yield f"{path}: {json.dumps(value)}"
    else:
        # Counts are part of the contract where the script fixes them; times and ids are not.
        fixed = path.rpartition(".")[2] in {
            "prompt_tokens",
            "completion_tokens",
            "total_tokens",
            "cached_tokens",
        }
        yield f"{path}: {value if fixed else type(value).__name__}"


def _event_facts(subscriber: zmq.Socket[bytes]) -> Iterator[str]:
    while subscriber.poll(1500):
        frames = subscriber.recv_multipart()
        yield f"events.frames: {len(frames)}"
        yield f"events.sequence_bytes: {len(frames[1])}"
        batch = msgspec.msgpack.decode(frames[2])
        yield f"events.batch: {[type(part).__name__ for part in batch]}"
        for event in batch[1]:
            yield from _shape(f"events.{event['type']}", {k: v for k, v in event.items() if k != "token_ids"})
            if "token_ids" in event:
                whole = len(event["token_ids"]) == event["block_size"] * len(event["block_hashes"])
                yield f"events.{event['type']}.token_ids fill the blocks: {whole}"


def _replay_facts(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Iterator[str]:
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", struct.pack(">Q", 0)])
        answered = 0
        while dealer.poll(2000):
            frames = dealer.recv_multipart()
            yield f"replay.frames: {len(frames)}"
            if struct.unpack(">q", frames[-2])[0] == -1:
                yield f"replay.end: empty payload {frames[-1] == b''}"
                break
            answered += 1
        yield f"replay.answered: {answered > 0}"
    finally:
        dealer.close(0)


# What the control plane reads, or a dashboard made for vLLM shows.
METRIC_NAMES = re.compile(
    r"vllm:(num_requests_(running|waiting)$|kv_cache_usage_perc|(external_)?prefix_cache_(queries|hits)_total"
    r"|prompt_tokens_total|generation_tokens_total|num_preemptions_total|request_success_total|cache_config_info"
    r"|(time_to_first_token|inter_token_latency|request_time_per_output_token|e2e_request_latency"
    r"|request_queue_time|request_prefill_time|request_decode_time)_seconds_(sum|count)$)"
)


def _metric_facts(name: str, text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        series, _, labels = line.rpartition(" ")[0].partition("{")
        if METRIC_NAMES.match(series):
            wanted = {"engine", "model_name", "block_size", "num_gpu_blocks"}
            names = {n for n in re.findall(r'(\w+)="', labels) if n in wanted}
            yield f"{name}.{series}: {sorted(names)}"
