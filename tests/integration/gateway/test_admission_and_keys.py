from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_core.registry import EngineKind, Instance, Role
from mooncake_testing.gateway import Gateway, gateway
from mooncake_testing.scripted_engine import Act, ScriptedEngine, engines
from mooncake_testing.waiting import until

KEYS = {"gold": {"key": "k-gold", "priority": 5, "weight": 2}, "free": "k-free"}


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} | more


async def ask(running: Gateway, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
    return await running.client.post("/v1/completions", json=body, headers=headers)


async def test_only_a_valid_key_comes_in_and_its_name_is_the_tenant(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    engine = ScriptedEngine("e")
    async with (
        engines(engine),
        gateway(
            tmp_path, [engine.instance()], auth={"api_keys_file": str(tmp_path / "keys.json")}
        ) as running,
    ):
        for headers in ({}, bearer("wrong"), {"Authorization": "Basic k-free"}, {"Authorization": "k-free"}):
            answer = await ask(running, **headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert engine.legs == []
        assert (await running.client.get("/v1/models")).status_code == 401
        assert (await running.client.get("/health")).status_code == 200
        assert (await ask(running, **bearer("k-free"))).status_code == 200
        assert running.scheduler.services.decisions.latest(1)[0].tenant == "free"
        assert "k-free" not in str(engine.legs[0].headers)


@pytest.mark.parametrize(
    ("key", "sent", "priority"),
    [("k-gold", None, 5), ("k-gold", "9", 5), ("k-gold", "2", 2), ("k-free", "9", 0)],
)
async def test_a_priority_is_no_higher_than_the_key_allows(
    tmp_path: Path, key: str, sent: str | None, priority: int
) -> None:
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    engine = ScriptedEngine("e")
    async with (
        engines(engine),
        gateway(
            tmp_path, [engine.instance()], auth={"api_keys_file": str(tmp_path / "keys.json")}
        ) as running,
    ):
        more = {} if sent is None else {"X-Mooncake-Priority": sent}
        assert (await ask(running, **bearer(key, **more))).status_code == 200
        found = running.scheduler.services.decisions.latest(1)[0].ask
        assert found is not None
        assert found.priority == priority
        assert (await ask(running, **bearer(key, **{"X-Mooncake-Priority": "high"}))).status_code == 400


async def test_changed_keys_count_without_a_restart_and_broken_ones_do_not(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(KEYS))
    engine = ScriptedEngine("e")
    async with (
        engines(engine),
        gateway(tmp_path, [engine.instance()], auth={"api_keys_file": str(keys)}) as running,
    ):
        api_keys = running.scheduler.datapath._keys
        fresh = tmp_path / "fresh.json"
        fresh.write_text('{"new":"k-new"}')
        os.replace(fresh, keys)
        assert api_keys.refresh()
        assert (await ask(running, **bearer("k-new"))).status_code == 200
        assert (await ask(running, **bearer("k-free"))).status_code == 401
        keys.write_text("{broken")
        assert not api_keys.refresh()
        assert (await ask(running, **bearer("k-new"))).status_code == 200


async def test_overload_is_refused_with_reason_prediction_and_retry_after(tmp_path: Path) -> None:
    hold = asyncio.Event()
    engine = ScriptedEngine("e")
    engine.usual = Act(hold=hold)
    slow = {
        "profile": "llama3-70b-8xa800", "slo": {"ttft_s": 1.0, "tbt_s": 1.0},
        "admission": {"mode": "predictive"},
    }  # fmt: skip
    async with engines(engine), gateway(tmp_path, [engine.instance()], **slow) as running:
        prompt = list(range(1, 8000))
        first = asyncio.ensure_future(running.complete(prompt=prompt))
        await engine.leg()
        refused = await running.complete(prompt=list(range(10_000, 18_000)))
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("overloaded", "ttft")
        assert error["predicted"]["ttft_s"] > 1.0
        assert int(refused.headers["retry-after"]) >= 1
        assert running.reserved == 1
        hold.set()
        assert (await first).status_code == 200
        await running.settled()


async def admin(running: Gateway, method: str, path: str, **more: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{running.scheduler.admin_port}{path}"
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.request(method, url, **more)


async def test_the_admin_port_tells_instances_statistics_and_decisions(tmp_path: Path) -> None:
    first, second = ScriptedEngine("a", cached_tokens=20), ScriptedEngine("b", cached_tokens=20)
    async with (
        engines(first, second),
        gateway(tmp_path, [first.instance(), second.instance()], profile="llama3-70b-8xa800") as running,
    ):
        answer = await running.complete(stream=True, stream_options={"include_usage": True})
        request_id = answer.headers["x-request-id"]
        await running.settled()
        listed = (await admin(running, "GET", "/instances")).json()
        assert [each["id"] for each in listed["instances"]] == ["a", "b"]
        assert {each["state"] for each in listed["instances"]} == {"ready"}
        assert listed["degraded"] == []
        stats = (await admin(running, "GET", "/stats")).json()
        assert (stats["admitted"], stats["completed"], stats["refused"]) == (1, 1, {})
        assert stats["token_hit_rate"] == 0.5
        assert stats["ttft"]["p50"] > 0
        decision = (await admin(running, "GET", f"/decisions/{request_id}")).json()
        assert {each["instance"] for each in decision["placement"]["considered"]} == {"a", "b"}
        assert decision["placement"]["ttft_s"] > 0
        assert decision["ttft_s"] > 0
        assert decision["outcome"] == "completed"
        assert len((await admin(running, "GET", "/decisions")).json()["decisions"]) == 1
        assert (await admin(running, "GET", "/decisions/none")).status_code == 404
        assert "mooncake_ttft_seconds" in (await admin(running, "GET", "/metrics")).text
        paths = (await admin(running, "GET", "/openapi.json")).json()["paths"]
        assert "/instances/{instance_id}/drain" in paths


async def test_a_drained_instance_gets_nothing_more_and_its_stream_ends_well(tmp_path: Path) -> None:
    first, second = ScriptedEngine("a"), ScriptedEngine("b")
    async with engines(first, second), gateway(tmp_path, [first.instance(), second.instance()]) as running:
        first.usual = second.usual = Act(tokens=20, gap_s=0.02)
        streaming = asyncio.ensure_future(running.stream())
        await until(lambda: bool(first.legs or second.legs))
        busy, other = (first, second) if first.legs else (second, first)
        assert (await admin(running, "POST", f"/instances/{busy.name}/drain")).json()["state"] == "draining"
        other.usual = Act()
        for _ in range(6):
            assert (await running.complete()).status_code == 200
        assert len(busy.legs) == 1
        assert (await streaming).endswith("data: [DONE]\n\n")
        assert (await admin(running, "DELETE", f"/instances/{busy.name}/drain")).json()["state"] == "ready"
        assert (await admin(running, "POST", "/instances/none/drain")).status_code == 404


async def test_a_store_is_not_said_to_be_drained(tmp_path: Path) -> None:
    engine = ScriptedEngine("a")
    store = Instance(
        id="kv", role=Role.STORE, url="http://127.0.0.1:9", cluster="test", pool="kv", model="tiny",
        engine=EngineKind.STORE,
    )  # fmt: skip
    async with engines(engine), gateway(tmp_path, [engine.instance(), store]) as running:
        for method in ("POST", "DELETE"):
            answer = await admin(running, method, "/instances/kv/drain")
            assert answer.status_code == 409
            assert "only engines can be drained" in answer.json()["detail"]


async def test_the_admin_port_wants_its_token_except_for_health_and_metrics(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    async with gateway(tmp_path, [], auth={"admin_token_file": str(tmp_path / "token")}) as running:
        assert (await admin(running, "GET", "/instances")).status_code == 401
        assert (await admin(running, "GET", "/instances", headers=bearer("wrong"))).status_code == 401
        assert (await admin(running, "GET", "/instances", headers=bearer("secret"))).status_code == 200
        assert (await admin(running, "GET", "/openapi.json")).status_code == 401
        assert (await admin(running, "GET", "/nowhere")).status_code == 401
        assert (await admin(running, "POST", "/query", content=b"no JSON")).status_code == 401
        twice = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer secret")]
        assert (await admin(running, "GET", "/instances", headers=twice)).status_code == 401
        assert (await admin(running, "GET", "/healthz")).status_code == 200
        assert (await admin(running, "GET", "/readyz")).status_code == 503
        assert (await admin(running, "GET", "/metrics")).status_code == 200


async def test_the_indexer_answers_in_mooncakes_and_in_dynamos_dialect(tmp_path: Path) -> None:
    engine = ScriptedEngine("e")
    async with engines(engine), gateway(tmp_path, [engine.instance()]) as running:
        ids = list(range(40))
        await running.complete(prompt=ids)
        mooncake = {"model": "tiny", "token_ids": ids, "block_size": 16, "tenant_id": "t"}
        found = (await admin(running, "POST", "/query", json=mooncake)).json()
        assert found == {
            "t": {"e": {"longest_matched": 32, "GPU": 32, "CPU": 32, "DISK": 32, "DP": {"0": 32}}}
        }
        dynamo = {"model_name": "tiny", "token_ids": ids, "instance_id": "e"}
        found = (await admin(running, "POST", "/query", json=dynamo)).json()
        assert found["instances"]["e"] == {
            "longest_matched": 32,
            "gpu": 32,
            "cpu": 32,
            "disk": 32,
            "dp": {"0": 32},
        }
        from mooncake_core.blocks import block_keys, local_hashes

        rolling = {"model": "tiny", "seq_hashes": list(block_keys(ids, 16)), "block_size": 16}
        found = (await admin(running, "POST", "/query_by_hash", json=rolling)).json()
        assert found["default"]["e"]["longest_matched"] == 32
        local = {"model_name": "tiny", "block_hashes": local_hashes(ids, 16)}
        found = (await admin(running, "POST", "/query_by_hash", json=local)).json()
        assert found["instances"]["e"]["gpu"] == 32
        wrong = mooncake | {"model": "other"}
        assert (await admin(running, "POST", "/query", json=wrong)).status_code == 404
        wrong = mooncake | {"block_size": 32}
        assert (await admin(running, "POST", "/query", json=wrong)).status_code == 422
