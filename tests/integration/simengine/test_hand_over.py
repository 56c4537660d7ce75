"""Prefill here, decode there: the protocols as a router speaks them, and what goes wrong in them."""

import threading
import time
from typing import Any

import httpx
import pytest

from mooncake_core.blocks import block_keys
from mooncake_testing.simulated import Simulated, SimulatedProcess

PROMPT = [(7 * n) % 300 + 10 for n in range(200)]
QUICK_TIMEOUT = {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "1.0", "MOONCAKE_SIMULATOR_DEAD_PEER_GRACE": "0.5"}


def mooncake(role: str) -> dict[str, str]:
    return {"kv_connector": "MooncakeConnector", "kv_role": role}


@pytest.fixture(scope="module")
def alone(simulated: Simulated) -> SimulatedProcess:
    return simulated.engine()


@pytest.fixture(scope="module")
def prefill(simulated: Simulated) -> SimulatedProcess:
    return simulated.engine(connector=mooncake("kv_both"), environ=QUICK_TIMEOUT)


@pytest.fixture(scope="module")
def decode(simulated: Simulated) -> SimulatedProcess:
    return simulated.engine(connector=mooncake("kv_both"), environ=QUICK_TIMEOUT)


def completion(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **fields}


def prefill_leg(transfer: str, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    return completion(prompt, **{"max_tokens": 1, "kv_transfer_params": params, **fields})


def engine_id(engine: SimulatedProcess) -> str:
    return str(engine.http.get(f"{engine.bootstrap_url}/query").json()["0"]["engine_id"])


def decode_leg(
    source: SimulatedProcess, transfer: str, prompt: list[int] = PROMPT, **params: Any
) -> dict[str, Any]:
    return completion(
        prompt,
        kv_transfer_params={
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": source.bootstrap_url,
            "remote_engine_id": engine_id(source),
            "transfer_id": transfer,
            **params,
        },
    )


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_prefill_and_decode_apart_give_the_tokens_of_one_engine_alone(
    alone: SimulatedProcess, prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    for number, length in enumerate((1, 15, 16, 17, 200, 1000)):
        prompt = [number, *PROMPT * 5][:length]
        first = prefill.post("/v1/completions", prefill_leg(f"same-{number}", prompt))
        assert first.json()["kv_transfer_params"] is None
        second = decode.post("/v1/completions", decode_leg(prefill, f"same-{number}", prompt))
        reference = tokens(alone.post("/v1/completions", completion(prompt)))
        assert tokens(first) == reference[:1]
        assert tokens(second) == reference


def test_all_blocks_are_free_again_on_both_sides_after_the_hand_over(
    prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    prefill.post("/v1/completions", prefill_leg("free"))
    assert prefill.get("/simulator/state")["held"] == 1
    decode.post("/v1/completions", decode_leg(prefill, "free"))
    for engine in (prefill, decode):
        state = engine.until("/simulator/state", held=0, running=0, loading=0)
        assert state["free_blocks"] == state["blocks"]


def test_a_transfer_that_is_prefilled_twice_holds_blocks_once(
    prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    for _ in range(2):
        prefill.post("/v1/completions", prefill_leg("twice"))
    assert prefill.get("/simulator/state")["held"] == 1
    decode.post("/v1/completions", decode_leg(prefill, "twice"))
    state = prefill.until("/simulator/state", held=0, running=0)
    assert state["free_blocks"] == state["blocks"]


def test_the_decode_engine_computes_no_prompt_token_and_caches_what_it_received(
    prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    prompt = [3, 1, 4, *PROMPT]
    computed = "vllm:prompt_tokens_by_source_total"
    prefill.post("/v1/completions", prefill_leg("cached", prompt))
    answer = decode.post("/v1/completions", decode_leg(prefill, "cached", prompt)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)
    assert decode.metric(f'{computed}{{engine="0",model_name="tiny",source="local_compute"}}') == 0
    received = set(block_keys(prompt, 16))
    for engine in (prefill, decode):
        assert received <= set(engine.get("/simulator/blocks")["keys"])


def test_decode_may_be_asked_before_prefill_has_begun(
    alone: SimulatedProcess, prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    prompt = [9, *PROMPT]
    answers: list[httpx.Response] = []
    body = decode_leg(prefill, "early", prompt)
    asking = threading.Thread(target=lambda: answers.append(decode.post("/v1/completions", body)))
    asking.start()
    decode.until("/simulator/state", loading=1)
    prefill.post("/v1/completions", prefill_leg("early", prompt))
    asking.join()
    assert tokens(answers[0]) == tokens(alone.post("/v1/completions", completion(prompt)))


def test_with_kv_both_the_roles_can_be_swapped(
    alone: SimulatedProcess, prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    prompt = [50, *PROMPT]
    decode.post("/v1/completions", prefill_leg("swapped", prompt))
    answer = prefill.post("/v1/completions", decode_leg(decode, "swapped", prompt))
    assert tokens(answer) == tokens(alone.post("/v1/completions", completion(prompt)))


def test_an_unknown_engine_or_a_dead_bootstrap_is_a_500_at_once(
    prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    for wrong in ({"remote_engine_id": "nobody"}, {"remote_bootstrap_addr": "http://127.0.0.1:9"}):
        prompt = [hash(str(wrong)) % 1000, *PROMPT]
        body = decode_leg(prefill, "wrong", prompt, **wrong)
        body["kv_transfer_params"]["remote_engine_id"] = wrong.get("remote_engine_id", "never seen")
        answer = decode.post("/v1/completions", body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"


def test_a_prefill_that_ends_by_a_stop_token_drops_its_kv_and_decode_waits_in_vain(
    prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    prompt = [77, *PROMPT]
    first = tokens(prefill.post("/v1/completions", prefill_leg("look", prompt)))
    stopped = prefill.post("/v1/completions", prefill_leg("dropped", prompt, stop_token_ids=first))
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    started = time.monotonic()
    answer = decode.post("/v1/completions", decode_leg(prefill, "dropped", prompt))
    assert answer.status_code == 500
    assert time.monotonic() - started >= 1.0


def test_kv_that_nobody_comes_for_is_freed_after_the_abort_timeout(prefill: SimulatedProcess) -> None:
    prefill.post("/v1/completions", prefill_leg("orphan", [88, *PROMPT]))
    assert prefill.get("/simulator/state")["held"] >= 1
    state = prefill.until("/simulator/state", held=0)
    assert state["free_blocks"] == state["blocks"]


def test_decode_notices_the_death_of_prefill_after_the_timeout_and_works_with_its_successor_at_once(
    simulated: Simulated, decode: SimulatedProcess
) -> None:
    source = simulated.engine(connector=mooncake("kv_producer"))
    source.post("/v1/completions", prefill_leg("warm"))
    decode.post("/v1/completions", decode_leg(source, "warm"))
    old = engine_id(source)
    body = decode_leg(source, "lost", [99, *PROMPT])
    source.kill()
    started = time.monotonic()
    assert decode.post("/v1/completions", body).status_code == 500
    assert time.monotonic() - started >= 1.5
    state = decode.until("/simulator/state", loading=0)
    assert state["free_blocks"] == state["blocks"]

    successor = simulated.engine(connector=mooncake("kv_producer"), base=source.base)
    assert engine_id(successor) != old
    successor.post("/v1/completions", prefill_leg("again", [5, *PROMPT]))
    tokens(decode.post("/v1/completions", decode_leg(successor, "again", [5, *PROMPT])))


def test_a_transfer_id_without_an_engine_id_hangs_and_kills_the_engine_when_its_client_leaves(
    simulated: Simulated,
) -> None:
    victim = simulated.engine(connector=mooncake("kv_consumer"))
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://127.0.0.1:9"}
    with pytest.raises(httpx.ReadTimeout):
        victim.post("/v1/completions", completion(PROMPT, kv_transfer_params=params), timeout_s=0.5)
    assert victim.process.wait(10) == 1
    assert "KeyError: 'remote_engine_id'" in victim.log.read_text()


def test_a_client_that_leaves_while_kv_is_awaited_leaves_its_blocks_allocated_until_then(
    prefill: SimulatedProcess, decode: SimulatedProcess
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        decode.post("/v1/completions", decode_leg(prefill, "never", [66, *PROMPT]), timeout_s=0.3)
    state = decode.get("/simulator/state")
    assert (state["running"], state["waiting"]) == (0, 0)
    assert state["free_blocks"] < state["blocks"]
    state = decode.until("/simulator/state", loading=0)
    assert state["free_blocks"] == state["blocks"]


def test_with_policy_recompute_decode_computes_what_does_not_arrive(
    simulated: Simulated, alone: SimulatedProcess, prefill: SimulatedProcess
) -> None:
    engine = simulated.engine(connector={**mooncake("kv_consumer"), "kv_load_failure_policy": "recompute"})
    answer = engine.post("/v1/completions", decode_leg(prefill, "x", remote_engine_id="nobody"))
    assert tokens(answer) == tokens(alone.post("/v1/completions", completion(PROMPT)))


def test_a_second_engine_cannot_register_over_the_first(prefill: SimulatedProcess) -> None:
    other = {"engine_id": "other", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://127.0.0.1:1"}
    answer = prefill.http.post(f"{prefill.bootstrap_url}/register", json=other)
    assert answer.status_code == 400
    assert "Engine ID mismatch" in answer.json()["detail"]
