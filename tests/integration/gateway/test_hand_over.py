from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mooncake_core.registry import Role
from mooncake_testing import scripted_pools
from mooncake_testing.gateway import gateway
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines

pair = partial(scripted_pools.pair, cached_tokens=(16, 39))


async def test_mooncake_legs_carry_exactly_the_fields_that_the_connector_expects(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        answer = await running.complete(stop=["\n"], min_tokens=3, stop_token_ids=[7], temperature=0.5)
        assert answer.status_code == 200
        sent = prefill.legs[0].body
        transfer = sent.pop("kv_transfer_params")
        assert sent == {
            "model": "tiny", "prompt": list(range(40)), "max_tokens": 1, "stream": False, "ignore_eos": True,
            "temperature": 0.5,
        }  # fmt: skip
        assert transfer == {
            "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer["transfer_id"],
        }  # fmt: skip
        taken = decode.legs[0].body
        assert taken.pop("kv_transfer_params") == {
            "do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": prefill.url,
            "remote_engine_id": "engine-p-1", "transfer_id": transfer["transfer_id"],
        }  # fmt: skip
        assert taken["stop"] == ["\n"]
        assert taken["min_tokens"] == 3
        assert taken["max_tokens"] == 4


async def test_nixl_hands_the_prefills_parameters_to_decode_unchanged(tmp_path: Path) -> None:
    async with pair(tmp_path, "NixlConnector") as (running, prefill, decode):
        await running.stream(max_completion_tokens=5, stream_options={"include_usage": True})
        sent = prefill.legs[0].body
        assert sent["kv_transfer_params"] == {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }  # fmt: skip
        assert sent["max_completion_tokens"] == 1
        assert "stream_options" not in sent
        returned = decode.legs[0].kv
        assert returned["remote_block_ids"] == [[1, 2, 3]]
        assert returned["do_remote_prefill"] is True
        assert decode.legs[0].body["stream"] is True


@pytest.mark.parametrize("connector", ["MooncakeConnector", "NixlConnector", ""])
async def test_transfer_parameters_of_a_client_never_reach_an_engine(tmp_path: Path, connector: str) -> None:
    role = Role.BOTH if not connector else Role.DECODE
    decode = ScriptedEngine("d", role, connector)
    prefill = ScriptedEngine("p", Role.PREFILL, connector)
    wanted = [decode] if not connector else [prefill, decode]
    body = (
        '{"model":"tiny","prompt":[1,2,3],"max_tokens":2,"kv_transfer_params":{"evil":1},'
        '"kv_transfer_par\\u0061ms":{"evil":2}}'
    )
    async with engines(*wanted), gateway(tmp_path, [e.instance() for e in wanted]) as running:
        answer = await running.client.post("/v1/completions", content=body)
        assert answer.status_code == 200
        for engine in wanted:
            assert b"evil" not in engine.legs[0].raw


async def test_transfer_parameters_among_vllms_extra_arguments_are_the_clients_own_mistake(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        for n in (1, 2):
            answer = await running.complete(n=n, vllm_xargs={"kv_transfer_params": "x"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs")
        assert "object" in (await running.complete(vllm_xargs=3)).json()["error"]["message"]
        assert prefill.legs == decode.legs == []
        for harmless in (None, {"mine": "kv_transfer_params"}):
            assert (await running.complete(vllm_xargs=harmless)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2}, {"best_of": 3}, {"prompt_logprobs": 1}, {"echo": True}, {"use_beam_search": True},
        {"prompt": ["one", "two"]}, {"prompt": [[1, 2], [3]]}, {"max_tokens": 0},
    ],
    ids=str,
)  # fmt: skip
async def test_what_cannot_be_handed_over_is_served_by_one_engine(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        assert (await running.complete(**fields)).status_code == 200
        assert prefill.legs == []
        assert "kv_transfer_params" not in decode.legs[0].body
        for field, value in fields.items():
            assert decode.legs[0].body[field] == value


@pytest.mark.parametrize(
    "fields", [{"n": 1}, {"best_of": None}, {"echo": False}, {"prompt_logprobs": None}], ids=str
)
async def test_such_fields_at_their_harmless_values_are_handed_over(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with pair(tmp_path) as (running, prefill, _):
        assert (await running.complete(**fields)).status_code == 200
        assert len(prefill.legs) == 1


async def test_the_usage_says_what_prefill_found_in_its_cache(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, _, _):
        answer = await running.complete()
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        text = await running.stream(stream_options={"include_usage": True})
        usage = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 16
        assert usage["completion_tokens"] == 4


async def test_the_parameters_of_the_hand_over_do_not_reach_the_client(tmp_path: Path) -> None:
    async with pair(tmp_path, "NixlConnector") as (running, _, decode):
        decode.usual = Act()
        answer = await running.complete()
        assert answer.json()["kv_transfer_params"] is None
        assert "127.0.0.1" not in answer.text


async def test_a_prefill_that_did_not_end_by_length_is_not_waited_for(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        prefill.usual = Act(finish_reason="stop")
        assert (await running.complete()).status_code == 200
        assert "kv_transfer_params" not in decode.legs[0].body


async def test_the_engine_id_is_asked_again_after_prefill_has_restarted(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        await running.complete()
        await prefill.kill()
        prefill.engine_id = "engine-p-2"
        await prefill.start()
        assert (await running.complete()).status_code == 200
        assert decode.legs[-1].kv["remote_engine_id"] == "engine-p-2"


async def test_the_engine_id_is_asked_again_after_a_hand_over_that_failed(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        await running.complete()
        asked = prefill.bootstrap_queries
        decode.script = [Act(status=500, body=b"{}")]
        await running.complete()
        await running.complete()
        assert prefill.bootstrap_queries > asked


async def test_each_data_parallel_rank_is_named_with_its_own_engine_id(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        prefill.ranks = 2
        running.scheduler.services.engine_ids.forget("p")
        for _ in range(4):
            await running.complete()
        ranks = [leg.headers.get("x-data-parallel-rank", "0") for leg in prefill.legs]
        ids = [leg.kv["remote_engine_id"] for leg in decode.legs]
        assert set(ranks) == {"0", "1"}
        assert [f"engine-p-1{'-1' * (rank == '1')}" for rank in ranks] == ids


async def test_engines_of_two_versions_are_not_paired(tmp_path: Path) -> None:
    connector = "MooncakeConnector"
    old_p, new_p = (ScriptedEngine(n, Role.PREFILL, connector) for n in ("old-p", "new-p"))
    old_d, new_d = (ScriptedEngine(n, Role.DECODE, connector) for n in ("old-d", "new-d"))
    versions = {old_p: "0.31.0", old_d: "0.31.0", new_p: "0.32.0", new_d: "0.32.0"}
    async with (
        engines(*versions),
        gateway(
            tmp_path, [engine.instance(engine_version=version) for engine, version in versions.items()]
        ) as running,
    ):
        for _ in range(12):
            assert (await running.complete()).status_code == 200
        assert [leg.kv["remote_bootstrap_addr"] for leg in old_d.legs] == [old_p.url] * len(old_d.legs)
        assert [leg.kv["remote_bootstrap_addr"] for leg in new_d.legs] == [new_p.url] * len(new_d.legs)
        assert len(old_d.legs) + len(new_d.legs) == 12


async def test_the_clients_request_id_is_kept_and_engines_get_another(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        headers = {"x-request-id": "mine-1", "traceparent": "00-aa-bb-01"}
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 1}
        answer = await running.client.post("/v1/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "mine-1"
        seen = decode.legs[0].headers
        assert seen["x-request-id"] == prefill.legs[0].headers["x-request-id"] != "mine-1"
        assert seen["traceparent"] == "00-aa-bb-01"


async def test_chats_go_on_as_chats_with_their_messages_untouched(tmp_path: Path) -> None:
    async with pair(tmp_path) as (running, prefill, decode):
        messages = '[{"role":"user","content":"h\\u00efé  x"}]'
        body = '{"model":"tiny","messages":' + messages + ',"max_tokens":3,"stream":true}'
        answer = await running.client.post("/v1/chat/completions", content=body.encode())
        assert answer.text.endswith("data: [DONE]\n\n")
        for leg in (prefill.legs[0], decode.legs[0]):
            assert leg.path == "/v1/chat/completions"
            assert messages.encode() in leg.raw


async def test_with_no_prefill_instance_left_decode_does_it_all(tmp_path: Path) -> None:
    decode = ScriptedEngine("d", Role.DECODE, "MooncakeConnector")
    async with engines(decode), gateway(tmp_path, [decode.instance()]) as running:
        assert (await running.complete()).status_code == 200
        assert "kv_transfer_params" not in decode.legs[0].body


async def test_a_second_turn_is_credited_with_what_the_first_left_in_the_cache(tmp_path: Path) -> None:
    first, second = ScriptedEngine("a"), ScriptedEngine("b")
    async with (
        engines(first, second),
        gateway(tmp_path, [first.instance(), second.instance()], profile="llama3-70b-8xa800") as running,
    ):
        await running.complete(prompt=list(range(160)))
        where = first if first.legs else second
        for _ in range(5):
            await running.complete(prompt=list(range(200)))
        assert len(where.legs) == 6
        latest = running.scheduler.services.decisions.latest(1)[0]
        assert latest.placement is not None
        assert latest.placement.prefix_tokens >= 160
