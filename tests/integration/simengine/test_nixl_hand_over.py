"""NIXL: the prefill engine's answer carries where its blocks are."""

from typing import Any

import pytest

from mooncake_testing.simulated import Simulated, SimulatedProcess

PROMPT = [(11 * n) % 300 + 10 for n in range(200)]
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(scope="module")
def pair(simulated: Simulated) -> list[SimulatedProcess]:
    short_lease = {**NIXL, "kv_connector_extra_config": {"kv_lease_duration": 1}}
    return [simulated.engine(connector=short_lease) for _ in range(2)]


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **fields}


def prefill(engine: SimulatedProcess, prompt: list[int]) -> dict[str, Any]:
    answer = engine.post("/v1/completions", body(prompt, max_tokens=1, kv_transfer_params=ASK)).json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def test_the_answer_has_the_fields_of_vllm_and_decode_goes_on_from_them(pair: list[SimulatedProcess]) -> None:
    source, target = pair
    params = prefill(source, PROMPT)
    assert set(params) == {
        *(
            "do_remote_prefill",
            "do_remote_decode",
            "remote_block_ids",
            "remote_engine_id",
            "remote_request_id",
        ),
        *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens"),
        *("remote_blocks_expiry_time", "transfer_mode", "remote_prefill_cached_tokens"),
    }
    assert (params["remote_num_tokens"], len(params["remote_block_ids"][0])) == (200, 13)
    answer = target.post("/v1/completions", body(PROMPT, kv_transfer_params=params)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert target.metric("vllm:external_prefix_cache_hits_total") == 200
    alone = source.post("/v1/completions", body(PROMPT)).json()
    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert target.metric("vllm:nixl_xfer_time_seconds_count") == 1
    state = source.until("/simulator/state", held=0)
    assert state["free_blocks"] == state["blocks"]


def test_blocks_can_be_read_once(pair: list[SimulatedProcess]) -> None:
    source, target = pair
    prompt = [1, *PROMPT]
    params = prefill(source, prompt)
    assert target.post("/v1/completions", body(prompt, kv_transfer_params=params)).status_code == 200
    failed = target.metric("vllm:nixl_num_failed_transfers_total")
    again = target.post("/v1/completions", body([2, *prompt], kv_transfer_params=params))
    assert again.status_code == 500
    assert target.metric("vllm:nixl_num_failed_transfers_total") == failed + 1


def test_unread_blocks_are_freed_when_the_lease_ends(pair: list[SimulatedProcess]) -> None:
    source, _ = pair
    prefill(source, [4, *PROMPT])
    source.until("/simulator/state", held=0)
    assert source.metric("vllm:nixl_num_kv_expired_reqs_total") == 1


def test_a_dead_prefill_engine_is_an_error_and_not_a_hang(
    simulated: Simulated, pair: list[SimulatedProcess]
) -> None:
    source, target = simulated.engine(connector=NIXL), pair[1]
    params = prefill(source, PROMPT)
    source.kill()
    answer = target.post("/v1/completions", body([6, *PROMPT], kv_transfer_params=params))
    assert answer.status_code == 500
