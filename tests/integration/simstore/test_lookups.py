"""Lookups through the store client bring blocks from a node's SSD to its DRAM, and faults cost time only."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from mooncake_simulator.store import calls
from mooncake_simulator.store import client as store_client
from mooncake_simulator.store.client import RPC_FAIL, RPC_TIMEOUT, MooncakeDistributedStore
from mooncake_testing.ports import free_port
from mooncake_testing.simulated import Simulated, SimulatedProcess
from mooncake_testing.waiting import eventually

KEYS = [f"key-{number}" for number in range(12)]
FLAGS = ("--promotion-on-hit", "true", "--promotion-max-per-heartbeat", "512", "--client-ttl", "2")


@pytest.fixture
def master(simulated: Simulated) -> SimulatedProcess:
    return simulated.master(*FLAGS)


@pytest.fixture
def node(simulated: Simulated, master: SimulatedProcess) -> SimulatedProcess:
    """A node whose SSD holds the older half of the keys; there is room in its DRAM for four of them."""
    one = simulated.node(master, "--ssd-size", "10MB", size="1000000B")
    for key in KEYS:
        call(master, "put_start", calls.PutStart(objects=[(key, 100_000)]))
        call(master, "put_end", calls.Keys(keys=[key]))
    assert places(master) == {**dict.fromkeys(KEYS[:3], "ssd"), **dict.fromkeys(KEYS[3:], "dram")}
    call(master, "remove", calls.Keys(keys=KEYS[6:]))
    return one


@pytest.fixture
def store(master: SimulatedProcess) -> Iterator[MooncakeDistributedStore]:
    one = MooncakeDistributedStore()
    assert set_up(one, f"127.0.0.1:{master.base}") == 0
    yield one
    assert one.close() == 0


def set_up(store: MooncakeDistributedStore, address: str) -> int:
    return store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address)


def call(master: SimulatedProcess, name: str, value: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(value)
    assert master.http.post(f"{master.url}/rpc/{name}", content=body).status_code == 200


def places(master: SimulatedProcess) -> dict[str, str]:
    """Where the admin port says that each key is."""
    asked = master.http.get(f"{master.bootstrap_url}/batch_query_keys", params={"keys": ",".join(KEYS)})
    return {key: "dram" if one["values"] else "ssd" for key, one in asked.json()["data"].items() if one["ok"]}


def promotions(master: SimulatedProcess) -> dict[str, int]:
    """The master's counters that are not 0."""
    text = master.http.get(f"{master.bootstrap_url}/metrics").text
    found = re.findall(r"^master_promotion_(\w+) (\d+)$", text, re.MULTILINE)
    return {name.removesuffix("_total"): int(value) for name, value in found if value != "0"}


def where(store: MooncakeDistributedStore, key: str) -> list[str]:
    return ["dram" if one.is_memory_replica() else "ssd" for one in store.get_replica_desc(key)]


def test_two_lookups_bring_a_key_back_when_its_node_has_carried_it(
    master: SimulatedProcess, node: SimulatedProcess, store: MooncakeDistributedStore
) -> None:
    node.process.send_signal(signal.SIGSTOP)
    assert where(store, "key-0") == where(store, "key-0") == ["ssd"]
    assert promotions(master) == {"in_flight": 1, "admitted": 1, "rejected_frequency": 1}
    node.process.send_signal(signal.SIGCONT)
    eventually(lambda: places(master)["key-0"] == "dram", "the node has carried it")
    assert promotions(master) == {
        "admitted": 1, "completed": 1, "completed_bytes": 100_000, "rejected_frequency": 1,
    }  # fmt: skip
    assert where(store, "key-0") == ["dram"]


def test_many_keys_are_looked_up_in_one_call_and_come_together(
    master: SimulatedProcess, node: SimulatedProcess, store: MooncakeDistributedStore
) -> None:
    wanted = [*KEYS[:3], "none"]
    for _ in range(2):
        found = store.batch_get_replica_desc(wanted)
        assert {key: [one.is_local_disk_replica() for one in some] for key, some in found.items()} == {
            key: [True] for key in KEYS[:3]
        }
    eventually(lambda: set(places(master).values()) == {"dram"}, "all of them have come")
    assert store.batch_is_exist(wanted) == [1, 1, 1, 0]
    assert (store.batch_is_exist([]), store.batch_get_replica_desc([])) == ([], {})
    assert store.get_replica_desc("none") == []


def test_an_engine_reads_from_dram_what_was_looked_up_before_its_turn_came(
    simulated: Simulated, master: SimulatedProcess, store: MooncakeDistributedStore
) -> None:
    """A block is 5 MiB; there is room for nine below the watermark, and the first turn has six of twelve."""
    simulated.node(master, "--ssd-size", "1GB", size="55MB")
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    environ = simulated.store_environ(master)
    writer, reader = (simulated.engine(connector=connector, environ=environ) for _ in range(2))
    turn, other = list(range(97)), list(range(200, 297))
    kept: list[list[str]] = []
    for prompt in (turn, other):
        known = {key for some in kept for key in some}
        assert writer.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 200
        eventually(lambda: len(all_keys(master)) == 6 * len(kept) + 6, "the prompt's blocks were put")
        kept.append([key for key in all_keys(master) if key not in known])

    def none_on_ssd_alone() -> bool:
        found = store.batch_get_replica_desc(kept[0])
        assert set(found) == set(kept[0])
        return all(one.is_memory_replica() for places in found.values() for one in places)

    assert not none_on_ssd_alone()
    eventually(none_on_ssd_alone, "who looks up until there is a memory replica sees all of them come")
    assert reader.post("/v1/completions", {"prompt": turn, "max_tokens": 1}).status_code == 200
    sources = {name: tokens_from(reader, name) for name in ("host", "disk")}
    assert sources == {"host": 96, "disk": 0}


def all_keys(master: SimulatedProcess) -> list[str]:
    return master.http.get(f"{master.bootstrap_url}/get_all_keys").text.split()


def tokens_from(engine: SimulatedProcess, source: str) -> float:
    labels = f'engine="0",model_name="tiny",source="{source}"'
    return engine.metric(f"vllm:prompt_tokens_cached_by_source_total{{{labels}}}")


def test_threads_may_look_up_at_once(
    master: SimulatedProcess, node: SimulatedProcess, store: MooncakeDistributedStore
) -> None:
    found: list[int] = []

    def look_up() -> None:
        found.extend(len(store.batch_get_replica_desc(KEYS)) for _ in range(20))

    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [6] * 80


def test_what_a_node_was_carrying_is_gone_with_it_and_nothing_stays_in_flight(
    master: SimulatedProcess, node: SimulatedProcess, store: MooncakeDistributedStore
) -> None:
    node.process.send_signal(signal.SIGSTOP)
    for _ in range(2):
        store.batch_get_replica_desc(KEYS)
    assert promotions(master)["in_flight"] == 3
    node.kill()
    eventually(lambda: "in_flight" not in promotions(master), "its segment is given up")
    assert promotions(master)["cancelled"] == 3
    assert store.batch_get_replica_desc(KEYS) == {}


def test_a_call_waits_for_a_master_that_restarts_and_gives_up_on_one_that_does_not(
    simulated: Simulated,
    master: SimulatedProcess,
    node: SimulatedProcess,
    store: MooncakeDistributedStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master.kill()
    monkeypatch.setattr(store_client, "_RECONNECT_S", 0.2)
    assert store.batch_is_exist(["key-0", "key-1"]) == [RPC_FAIL, RPC_FAIL]
    assert (store.get_replica_desc("key-0"), store.batch_get_replica_desc(["key-0"])) == ([], {})
    monkeypatch.setattr(store_client, "_RECONNECT_S", 60.0)
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(store.batch_is_exist(["key-0"])))
    asking.start()
    simulated.master(*FLAGS, base=master.base)
    asking.join()
    assert answers == [[0]]


def test_a_master_that_hangs_is_told_from_keys_that_are_not_there(
    master: SimulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    store = MooncakeDistributedStore()
    assert set_up(store, f"127.0.0.1:{master.base}") == 0
    master.process.send_signal(signal.SIGSTOP)
    assert store.batch_is_exist(["key-0"]) == [RPC_TIMEOUT]
    assert (store.get_replica_desc("key-0"), store.batch_get_replica_desc(["key-0"])) == ([], {})
    master.process.send_signal(signal.SIGCONT)
    assert store.batch_is_exist(["key-0"]) == [0]
    store.close()


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nobody:port"])
def test_a_setup_without_a_master_fails_and_no_call_may_follow(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "2")
    monkeypatch.setattr(store_client, "_RECONNECT_S", 0.1)
    store = MooncakeDistributedStore()
    assert set_up(store, address.format(port=free_port())) == -1
    uses: list[Callable[[], object]] = [
        lambda: store.get_replica_desc("k"),
        lambda: store.batch_get_replica_desc(["k"]),
        lambda: store.batch_is_exist(["k"]),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="not set up"):
            use()
    assert (store.close(), store.close()) == (0, 0)


@pytest.mark.parametrize("wrong", [["--promotion-on-hit", "perhaps"], ["--promotion-max-per-heartbeat", "0"]])
def test_flags_that_make_no_sense_are_refused_by_name(simulated: Simulated, wrong: list[str]) -> None:
    with pytest.raises(AssertionError, match=wrong[0]):
        simulated.master(*wrong)
