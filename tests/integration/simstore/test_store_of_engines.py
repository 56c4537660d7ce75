"""Engines that share a store: what one computed the other fetches, and faults cost time only."""

from typing import Any

import httpx
import pytest
import zmq

from mooncake_core.events import BlockStored, decode_batch
from mooncake_core.events.framing import parse_replay_answer, replay_request
from mooncake_core.index import Tier
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import eventually

STORE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


def multi(role: str, **extra: Any) -> dict[str, Any]:
    store = {**STORE, "kv_connector_extra_config": extra}
    connectors = [{"kv_connector": "MooncakeConnector", "kv_role": role}, store]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": connectors},
    }


@pytest.fixture(scope="module")
def master(simulated: Simulated) -> SimulatedProcess:
    return simulated.master("--default-kv-lease-ttl", "100", "--client-ttl", "2")


@pytest.fixture(scope="module")
def node(simulated: Simulated, master: SimulatedProcess) -> SimulatedProcess:
    return simulated.node(master)


@pytest.fixture(scope="module")
def engines(
    simulated: Simulated, master: SimulatedProcess, node: SimulatedProcess
) -> dict[str, SimulatedProcess]:
    environ = simulated.store_environ(master)
    return {
        "prefill": simulated.engine(connector=multi("kv_producer"), environ=environ, events=True),
        "other": simulated.engine(connector=STORE, environ=environ),
        "decode": simulated.engine(connector=multi("kv_consumer", save_decode_cache=True), environ=environ),
    }


def ask(engine: SimulatedProcess, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True, **fields}
    answer = engine.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def settled(engine: SimulatedProcess, puts: int) -> None:
    for _ in range(500):
        if engine.metric("vllm:mooncake_store_operation_total") and puts <= engine.metric(
            'vllm:mooncake_store_operation_total{engine="0",model_name="tiny",operation="save_put",status="ok"}'
        ):
            return
    raise AssertionError("nothing was put")


def test_what_one_engine_computed_another_fetches_and_answers_the_same(
    engines: dict[str, SimulatedProcess], master: SimulatedProcess
) -> None:
    prompt = list(range(100, 300))
    first = ask(engines["prefill"], prompt)
    settled(engines["prefill"], 1)
    second = ask(engines["other"], prompt)
    assert (cached(first), cached(second)) == (0, 192)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    other = engines["other"]
    assert other.metric("vllm:external_prefix_cache_hits_total") == 192
    assert (
        other.metric('vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="host"}')
        == 192
    )
    keys = other.http.get(f"{master.bootstrap_url}/get_all_keys").text.split()
    assert len(keys) == 12
    assert all(key.startswith("tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@") for key in keys)


def test_the_fetched_part_continues_what_lies_in_local_memory(engines: dict[str, SimulatedProcess]) -> None:
    start = list(range(400, 496))
    ask(engines["other"], start)
    ask(engines["prefill"], [*start, *range(500, 600)])
    settled(engines["prefill"], 2)
    queries = engines["other"].metric("vllm:prefix_cache_hits_total")
    answer = ask(engines["other"], [*start, *range(500, 600)])
    assert cached(answer) == 192
    assert engines["other"].metric("vllm:prefix_cache_hits_total") - queries == 96


def test_the_next_turn_on_another_engine_computes_the_new_message_and_one_block_at_most(
    engines: dict[str, SimulatedProcess],
) -> None:
    prefill, decode = engines["prefill"], engines["decode"]
    prompt = list(range(1000, 1100))
    engine_id = prefill.http.get(f"{prefill.bootstrap_url}/query").json()["0"]["engine_id"]
    ask(
        prefill,
        prompt,
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "turn-1"},
    )
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": "turn-1",
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": prefill.bootstrap_url,
    }
    output = ask(decode, prompt, max_tokens=60, kv_transfer_params=params)["choices"][0]["token_ids"]
    settled(decode, 1)
    second_turn = [*prompt, *output, *range(2000, 2040)]
    assert len(second_turn) - cached(ask(engines["other"], second_turn)) <= 40 + 16


def test_without_its_node_an_engine_computes_for_itself_and_uses_the_next_node(
    simulated: Simulated,
    engines: dict[str, SimulatedProcess],
    master: SimulatedProcess,
    node: SimulatedProcess,
) -> None:
    prompt = list(range(3000, 3100))
    ask(engines["prefill"], prompt)
    settled(engines["prefill"], 3)
    node.kill()
    answer = ask(engines["other"], prompt)
    assert cached(answer) == 0
    assert engines["other"].metric("vllm:mooncake_store_operation_total") > 0
    simulated.node(master)
    for _ in range(100):
        segments = node.http.get(f"{master.bootstrap_url}/get_all_segments").text.split()
        if segments and f"127.0.0.1:{node.base}" not in segments:
            break
    puts = int(
        engines["prefill"].metric(
            'vllm:mooncake_store_operation_total{engine="0",model_name="tiny",operation="save_put",status="ok"}'
        )
    )
    ask(engines["prefill"], list(range(3200, 3300)))
    settled(engines["prefill"], puts + 1)
    assert cached(ask(engines["other"], list(range(3200, 3300)))) == 96


def test_what_one_node_took_is_told_of_though_another_is_gone(simulated: Simulated) -> None:
    master = simulated.master("--client-ttl", "60")
    nodes = [simulated.node(master) for _ in range(2)]
    engine = simulated.engine(connector=STORE, environ=simulated.store_environ(master), events=True)
    nodes[0].kill()
    ask(engine, [n % 300 for n in range(40 * 16 + 1)])
    admin = master.bootstrap_url

    def there() -> int:
        return len(httpx.get(f"{admin}/get_all_keys", trust_env=False).text.split())

    eventually(lambda: 0 < there() < 40, "the node that is left has its share")
    eventually(lambda: told_of_the_store(engine) == there(), "all that is in the store was told of")


def told_of_the_store(engine: SimulatedProcess) -> int:
    """Blocks that the engine's events say are in the store, all of its life."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(engine.replay_endpoint)
        dealer.send_multipart(replay_request(0))
        told = 0
        while (message := parse_replay_answer(dealer.recv_multipart())) is not None:
            stored = [each for each in decode_batch(message.payload).events if isinstance(each, BlockStored)]
            told += sum(len(each.hashes) for each in stored if each.medium is Tier.DRAM)
        return told


def test_without_the_master_requests_are_computed_and_after_its_restart_nodes_mount_again(
    simulated: Simulated, engines: dict[str, SimulatedProcess], master: SimulatedProcess
) -> None:
    prompt = list(range(4000, 4100))
    master.kill()
    assert cached(ask(engines["other"], prompt)) == 0
    again = simulated.master(base=master.base)
    http = engines["other"].http
    for _ in range(300):
        if http.get(f"{again.bootstrap_url}/get_all_segments").text:
            break
    assert http.get(f"{again.bootstrap_url}/get_all_keys").text == ""
    ask(engines["prefill"], prompt)
    for _ in range(300):
        if http.get(f"{again.bootstrap_url}/get_all_keys").text:
            break
    assert cached(ask(engines["other"], [*prompt[:96], *range(50)])) == 96


def test_an_engine_without_its_store_configuration_says_what_is_missing(simulated: Simulated) -> None:
    with pytest.raises(AssertionError, match="MOONCAKE_CONFIG_PATH"):
        simulated.engine(connector=STORE)


def test_an_embedded_segment_is_lent_by_the_engine_itself(simulated: Simulated) -> None:
    master = simulated.master()
    environ = simulated.store_environ(master, mode="embedded", global_segment_size="1GB")
    engine = simulated.engine(connector=STORE, environ=environ)
    for _ in range(300):
        detail = httpx.get(f"{master.bootstrap_url}/get_segments_detail").json()
        if detail["total_segments"]:
            break
    assert detail["segments"][0]["size_bytes"] == 1 << 30
    ask(engine, list(range(100, 200)))
    settled(engine, 1)
    engine.terminate()
    assert httpx.get(f"{master.bootstrap_url}/get_all_segments").text == ""
