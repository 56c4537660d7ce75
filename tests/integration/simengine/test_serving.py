"""One engine towards its clients."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mooncake_testing.simulated import Simulated, SimulatedProcess


@pytest.fixture(scope="module")
def engine(simulated: Simulated) -> SimulatedProcess:
    return simulated.engine("--num-gpu-blocks-override", "200")


@pytest.fixture
def client(engine: SimulatedProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def documents(answer: httpx.Response) -> list[dict[str, Any]]:
    events = [line for line in answer.text.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_the_openai_client_reads_streams_and_whole_answers_alike(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Tell me", max_tokens=12)
    stream = client.completions.create(
        model="tiny", prompt="Tell me", max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_chats_are_rendered_and_answered_by_the_assistant(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=5)
    chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=5, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content


def test_tokenize_gives_the_ids_that_are_served_and_detokenize_the_text(engine: SimulatedProcess) -> None:
    text = "Grüße, 世界"
    ids = engine.post("/tokenize", {"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"])
    served = engine.post(
        "/v1/completions", {"prompt": text, "max_tokens": 1, "return_token_ids": True}
    ).json()
    assert served["choices"][0]["prompt_token_ids"] == ids["tokens"]
    assert engine.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": text}]
    chat = engine.post("/tokenize", {"messages": messages}).json()
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    assert engine.post("/v1/chat/completions", body).json()["prompt_token_ids"] == chat["tokens"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "param"),
    [
        ({"model": "nobody", "prompt": "x"}, 404, "NotFoundError", "model"),
        ({"prompt": [1] * 5000}, 400, "BadRequestError", "input_tokens"),
        ({"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"prompt": "x", "max_tokens": 2, "min_tokens": 3}, 400, "BadRequestError", None),
        ({"max_tokens": 2}, 400, "BadRequestError", "prompt"),
        ({"prompt": [-1]}, 400, "Bad Request", "prompt"),
        ({"prompt": ["a", "b"]}, 400, "BadRequestError", "prompt"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "Bad Request", "stream_options"),
    ],
)
def test_wrong_requests_are_refused_in_the_form_of_vllm(
    engine: SimulatedProcess, body: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    answer = engine.post("/v1/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"], error["param"]) == (status, status, kind, param)


def test_what_is_no_json_is_a_400_and_unknown_paths_are_404(engine: SimulatedProcess) -> None:
    assert engine.http.post(f"{engine.url}/v1/completions", content=b"{").status_code == 400
    assert engine.http.get(f"{engine.url}/nowhere").status_code == 404
    assert engine.http.get(f"{engine.url}/v1/completions").status_code == 405


def test_cached_tokens_never_include_the_last_one(engine: SimulatedProcess) -> None:
    body = {"prompt": [4] * 64, "max_tokens": 1}
    cached = [
        engine.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 48]


def test_a_stop_string_ends_the_answer_before_it(engine: SimulatedProcess) -> None:
    body = {"prompt": "Say something long", "max_tokens": 40, "ignore_eos": True}
    whole = engine.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = whole[10:13]
    at = whole.index(stop)
    for stream in (False, True):
        answer = engine.post("/v1/completions", {**body, "stop": stop, "stream": stream})
        choices = [d["choices"][0] for d in (documents(answer) if stream else [answer.json()])]
        assert "".join(choice["text"] for choice in choices) == whole[:at]
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)


def test_a_client_that_leaves_frees_its_memory(engine: SimulatedProcess) -> None:
    body = {"prompt": [5] * 100, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with engine.http.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        assert engine.get("/simulator/state")["running"] == 1
    state = engine.until("/simulator/state", running=0)
    assert state["free_blocks"] == state["blocks"]


def test_more_requests_than_memory_can_hold_are_preempted_and_still_all_answered(
    engine: SimulatedProcess,
) -> None:
    answers: list[httpx.Response] = []
    body = {"max_tokens": 300, "ignore_eos": True, "return_token_ids": True}

    def ask(number: int) -> None:
        answers.append(engine.post("/v1/completions", {**body, "prompt": [number] * 100}))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.metric("vllm:num_preemptions_total") > 0
    for answer in answers:
        assert len(answer.json()["choices"][0]["token_ids"]) == 300
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_requests_beyond_the_queue_limit_are_a_503(simulated: Simulated) -> None:
    engine = simulated.engine("--max-num-queued-reqs", "20")
    # Stands still from the first request on: the queue stays as long as it is however slow this machine is.
    assert engine.post("/simulator/faults", {"stall_s": 300.0}).status_code == 200
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as waiting:
        for _ in range(20):
            client = waiting.enter_context(socket.create_connection(("127.0.0.1", engine.base)))
            client.sendall(head + body)
        engine.until("/simulator/state", waiting=20)
        answer = engine.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "Service Unavailable"
    assert engine.metric("vllm:admission_rejections_total") == 1


def test_model_time_passes_as_the_cost_model_says(engine: SimulatedProcess) -> None:
    before_s = engine.metric("vllm:request_prefill_time_seconds_sum")
    started = time.monotonic()
    assert engine.post("/v1/completions", {"prompt": [321] * 3000, "max_tokens": 1}).status_code == 200
    expected_s = 1.1184e-4 * 3000 + 7.466e-10 * 3000**2
    spent_s = engine.metric("vllm:request_prefill_time_seconds_sum") - before_s
    assert spent_s == pytest.approx(expected_s, rel=1e-6)
    assert time.monotonic() - started >= expected_s / 50


def test_faults_come_and_go_on_demand(engine: SimulatedProcess) -> None:
    ask = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
    engine.post("/simulator/faults", {"status_503_retry_after": 7})
    answer = engine.post("/v1/completions", ask)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    engine.post("/simulator/faults", {"status_503_retry_after": None, "status_500": 1})
    assert engine.post("/v1/completions", ask).status_code == 500
    assert engine.post("/v1/completions", ask).status_code == 200
    engine.post("/simulator/faults", {"eos_after_tokens": 0})
    answer = engine.post("/v1/completions", {**ask, "ignore_eos": False})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    engine.post("/simulator/faults", {"eos_after_tokens": None, "break_stream_after_tokens": 3})
    with pytest.raises(httpx.TransportError):
        engine.post("/v1/completions", {**ask, "stream": True})
    engine.post("/simulator/faults", {"break_stream_after_tokens": None, "unhealthy": True})
    assert engine.http.get(f"{engine.url}/health").status_code == 503
    engine.post("/simulator/faults", {"unhealthy": False})
    wrong = engine.post("/simulator/faults", {"explode": True})
    assert (wrong.status_code, "explode" in wrong.text) == (400, True)


def test_a_stalled_engine_stands_still_and_then_goes_on(engine: SimulatedProcess) -> None:
    started = time.monotonic()
    engine.post("/simulator/faults", {"stall_s": 0.7})
    assert engine.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert time.monotonic() - started >= 0.7


def test_a_hanging_engine_takes_requests_and_never_answers(engine: SimulatedProcess) -> None:
    engine.post("/simulator/faults", {"hang": True})
    with pytest.raises(httpx.ReadTimeout):
        engine.post("/v1/completions", {"prompt": "x"}, timeout_s=0.3)
    engine.post("/simulator/faults", {"hang": False})
    assert engine.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_only_prefill_legs_fail_when_prefill_was_told_to(engine: SimulatedProcess) -> None:
    engine.post("/simulator/faults", {"fail_prefill": 1})
    leg = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answers = [engine.post("/v1/completions", body).status_code for body in ({"prompt": "x"}, leg, leg)]
    assert answers == [200, 500, 200]


def test_an_engine_told_to_die_in_the_middle_breaks_its_streams(simulated: Simulated) -> None:
    victim = simulated.engine()
    victim.post("/simulator/faults", {"die_after_tokens": 5})
    body = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
    with pytest.raises(httpx.TransportError):
        victim.post("/v1/completions", body)
    assert victim.process.wait(10) == -9


def test_on_sigterm_streams_end_at_once_with_abort_and_the_exit_is_clean(simulated: Simulated) -> None:
    leaving = simulated.engine()
    body = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(leaving.post("/v1/completions", body)))
    asking.start()
    leaving.until("/simulator/state", running=1)
    assert leaving.terminate() == 0
    asking.join()
    assert documents(answers[0])[-1]["choices"][0]["finish_reason"] == "abort"


def test_with_a_shutdown_timeout_running_streams_finish_and_new_requests_fail(simulated: Simulated) -> None:
    leaving = simulated.engine("--shutdown-timeout", "20")
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(leaving.post("/v1/completions", body)))
    asking.start()
    leaving.until("/simulator/state", running=1)
    leaving.process.terminate()
    leaving.until("/simulator/state", draining=True)
    assert leaving.http.get(f"{leaving.url}/health").status_code == 200
    assert leaving.post("/v1/completions", {"prompt": "x"}).status_code == 500
    asking.join()
    last = documents(answers[0])[-1]["choices"][0]
    assert (len(documents(answers[0])), last["finish_reason"]) == (1000, "length")
    assert leaving.process.wait(10) == 0


def test_a_port_in_use_is_said_in_one_line(engine: SimulatedProcess) -> None:
    command = [sys.executable, "-m", "mooncake_simulator.engine", "--model", "tiny", "--host", "127.0.0.1"]
    ended = subprocess.run(
        [*command, "--port", str(engine.base)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("mooncake_simulator.engine: cannot listen: ")
    assert len(ended.stderr.splitlines()) == 1


def test_an_events_port_in_use_is_said_by_its_name(simulated: Simulated) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        base = taken.getsockname()[1] - 4
        with pytest.raises(AssertionError, match=r"cannot listen: .*KV events"):
            simulated.engine(base=base, events=True)
