"""A leader and its workers as real processes: they serve together and end together."""

from __future__ import annotations

import httpx
import pytest

from mooncake_testing.ports import free_ports
from mooncake_testing.simulated import PORTS_A_POD, Simulated, SimulatedProcess, group_flags
from mooncake_testing.waiting import eventually

PROMPT = {"model": "tiny", "prompt": list(range(1, 400)), "max_tokens": 4, "ignore_eos": True}


def pair(simulated: Simulated, *flags: str) -> tuple[SimulatedProcess, SimulatedProcess]:
    base = free_ports(PORTS_A_POD)
    worker = simulated.worker(base, 1, *flags)
    return simulated.engine(*group_flags(base, 0), *flags, base=base), worker


def says(process: SimulatedProcess, words: str) -> bool:
    return words in process.log.read_text()


def test_a_leader_opens_its_port_when_all_its_workers_have_joined(simulated: Simulated) -> None:
    base = free_ports(PORTS_A_POD)
    leader = simulated.leader(base)
    first = simulated.worker(base, 1, nodes=3)
    eventually(lambda: says(leader, "rank 1 has joined"), "one is there")
    assert not is_served(leader), "another one is missing"
    simulated.worker(base, 2, nodes=3)
    eventually(lambda: is_served(leader), "all are there")
    assert first.process.poll() is None


def is_served(leader: SimulatedProcess) -> bool:
    try:
        return leader.http.get(f"{leader.url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_worker_that_was_told_otherwise_is_refused_and_says_so(simulated: Simulated) -> None:
    base = free_ports(PORTS_A_POD)
    simulated.leader(base)
    worker = simulated.worker(base, 1, nodes=2)
    assert worker.process.wait(30) == 1
    assert says(worker, "the leader refuses: rank 1 was told")


def test_leader_and_worker_serve_one_engine(simulated: Simulated) -> None:
    leader, worker = pair(simulated)
    answer = leader.post("/v1/completions", PROMPT)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert worker.process.poll() is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{worker.base}/health", trust_env=False)


def test_a_killed_worker_ends_its_leader(simulated: Simulated) -> None:
    leader, worker = pair(simulated)
    worker.kill()
    assert leader.process.wait(30) == 1
    assert "rank 1 is gone" in leader.log.read_text()


def test_a_killed_leader_ends_its_worker(simulated: Simulated) -> None:
    leader, worker = pair(simulated)
    leader.kill()
    assert worker.process.wait(30) == 1
    assert "is lost" in worker.log.read_text()


def test_a_leader_that_is_told_to_end_lets_its_worker_go(simulated: Simulated) -> None:
    leader, worker = pair(simulated)
    assert leader.terminate() == 0
    assert worker.process.wait(30) == 0


def test_a_worker_waits_for_its_leader_and_can_be_told_to_end_meanwhile(simulated: Simulated) -> None:
    worker = simulated.worker(free_ports(PORTS_A_POD), 1)
    eventually(lambda: says(worker, "rank 1 looks for its leader"), "it looks for it")
    assert worker.terminate() == 0


def test_more_pods_hold_more_and_compute_prompts_faster(simulated: Simulated) -> None:
    leader, _ = pair(simulated)
    alone = simulated.engine()
    twice, once = (engine.get("/simulator/state")["blocks"] for engine in (leader, alone))
    assert twice == 2 * once
    prompt = {**PROMPT, "prompt": list(range(1, 30_000)), "max_tokens": 1}
    spent = []
    for engine in (leader, alone):
        before = engine.metric("vllm:time_to_first_token_seconds_sum")
        engine.post("/v1/completions", prompt)
        spent.append(engine.metric("vllm:time_to_first_token_seconds_sum") - before)
    assert spent[0] < 0.7 * spent[1]
