"""The master's admin port, as operators and sidecars use it."""

import time
from typing import Any

import pytest

from mooncake_simulator.engine.http_client import CallError, HttpClient
from mooncake_simulator.store import calls
from mooncake_testing.simulated import Simulated, SimulatedProcess


@pytest.fixture(scope="module")
def master(simulated: Simulated) -> SimulatedProcess:
    return simulated.master()


@pytest.fixture(scope="module")
def nodes(simulated: Simulated, master: SimulatedProcess) -> list[SimulatedProcess]:
    return [simulated.node(master, size="1MB") for _ in range(2)]


def admin(master: SimulatedProcess, method: str, path: str, body: Any = None) -> Any:
    return master.http.request(method, f"{master.bootstrap_url}{path}", json=body)


async def put(master: SimulatedProcess, keys: list[str], size: int = 1000) -> list[str]:
    client = HttpClient(master.url)
    placed = await client.call("/rpc/put_start", calls.PutStart(objects=[(key, size) for key in keys]))
    await client.call("/rpc/put_end", calls.Keys(keys=keys))
    client.close()
    assert isinstance(placed, list)
    return placed


def test_health_and_role_are_those_of_a_leader(master: SimulatedProcess) -> None:
    assert admin(master, "GET", "/health").json() == {
        "status": "ok",
        "role": "leader",
        "ha_state": "serving",
        "service_ready": True,
    }
    assert admin(master, "GET", "/role").text == "leader"
    assert admin(master, "GET", "/ha_status").text == "serving"
    assert "service_ready=true" in admin(master, "GET", "/metrics/summary").text


async def test_keys_can_be_asked_one_by_one_and_many_at_once(
    master: SimulatedProcess, nodes: list[SimulatedProcess]
) -> None:
    (segment,) = await put(master, ["one"])
    found = admin(master, "GET", "/query_key?key=one").json()
    assert found["data"][0]["transport_endpoint_"] == segment
    assert admin(master, "GET", "/query_key?key=none").status_code == 404
    many = admin(master, "GET", "/batch_query_keys?keys=one,none").json()["data"]
    assert (many["one"]["ok"], many["one"]["error"], many["one"]["local_disk_values"]) == (True, None, None)
    # As a master of Mooncake 0.3.13 answered.
    missing = dict.fromkeys(["values", "disk_values", "local_disk_values", "nof_values"])
    assert many["none"] == {"ok": False, "error": "OBJECT_NOT_FOUND", **missing}
    assert admin(master, "GET", "/batch_query_keys").status_code == 400


async def test_a_drained_segment_is_empty_and_its_objects_are_elsewhere(
    master: SimulatedProcess, nodes: list[SimulatedProcess]
) -> None:
    keys = [f"key-{number}" for number in range(20)]
    await put(master, keys)
    source = f"127.0.0.1:{nodes[0].base}"
    job = admin(master, "POST", "/api/v1/drain_jobs", {"segments": [source]}).json()
    assert (job["success"], job["status"]) == (True, "CREATED")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        report = admin(master, "GET", f"/api/v1/drain_jobs/query?job_id={job['job_id']}").json()
        if report["status_name"] == "SUCCEEDED":
            break
    assert report["succeeded_units"] > 0
    assert report["migrated_bytes"] == 1000 * report["succeeded_units"]
    status = admin(master, "GET", f"/api/v1/segments/status?segment={source}").json()
    assert status["status_name"] == "DRAINED"
    data = admin(master, "GET", f"/batch_query_keys?keys={','.join(keys)}").json()["data"]
    assert {one["values"][0]["transport_endpoint_"] for one in data.values()} == {
        f"127.0.0.1:{nodes[1].base}"
    }


def test_jobs_and_segments_that_are_not_there_are_404(
    master: SimulatedProcess, nodes: list[SimulatedProcess]
) -> None:
    assert admin(master, "GET", "/api/v1/drain_jobs/query?job_id=none").status_code == 404
    assert admin(master, "GET", "/api/v1/segments/status?segment=none").status_code == 404
    assert admin(master, "POST", "/api/v1/drain_jobs", {"segments": ["none"]}).status_code == 404
    assert admin(master, "POST", "/api/v1/drain_jobs", {"segments": 3}).status_code == 400


def test_tenant_quotas_are_kept(master: SimulatedProcess) -> None:
    path = "/api/v1/tenant_quotas"
    admin(master, "PUT", path, {"tenant_id": "a", "quota_bytes": 5})
    assert admin(master, "GET", path).json()["data"] == [{"tenant_id": "a", "quota_bytes": 5}]
    admin(master, "DELETE", f"{path}?tenant_id=a")
    assert admin(master, "GET", path).json()["data"] == []


async def test_a_node_that_is_told_to_go_takes_its_segment_with_it(
    simulated: Simulated, master: SimulatedProcess, nodes: list[SimulatedProcess]
) -> None:
    leaving = simulated.node(master, size="1MB")
    name = f"127.0.0.1:{leaving.base}"
    assert name in admin(master, "GET", "/get_all_segments").text
    assert leaving.terminate() == 0
    assert name not in admin(master, "GET", "/get_all_segments").text


async def test_remove_all_empties_the_store(master: SimulatedProcess, nodes: list[SimulatedProcess]) -> None:
    await put(master, ["last"])
    assert admin(master, "POST", "/api/v1/remove_all").json()["success"]
    assert admin(master, "GET", "/get_all_keys").text == ""
    metrics = admin(master, "GET", "/metrics").text
    assert "master_key_count 0" in metrics
    assert "master_allocated_bytes 0" in metrics


async def test_calls_that_make_no_sense_are_refused_by_name(master: SimulatedProcess) -> None:
    client = HttpClient(master.url)
    with pytest.raises(CallError, match=r"400.*Keys"):
        await client.call("/rpc/get", {"keys": 3})
    with pytest.raises(CallError, match="404"):
        await client.call("/rpc/explode", {})
    client.close()
