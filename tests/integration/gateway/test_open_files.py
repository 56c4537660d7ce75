"""A login shell's limit on open files is not the limit on clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec

from mooncake_testing.scheduler_process import SchedulerProcess
from mooncake_testing.scripted_engine import ScriptedEngine, engines

LIMIT = 128


async def test_more_idle_clients_than_a_shell_lets_a_process_open_keep_nobody_out(tmp_path: Path) -> None:
    engine = ScriptedEngine("b0")
    file = tmp_path / "instances.json"
    async with engines(engine):
        file.write_bytes(msgspec.json.encode([engine.instance()]))
        process = SchedulerProcess(tmp_path, instances_file=str(file), open_files=LIMIT)
        idle = []
        try:
            await process.ready()
            for _ in range(2 * LIMIT):
                idle.append(await asyncio.open_connection("127.0.0.1", process.serving_port))
            async with httpx.AsyncClient(base_url=process.url, timeout=10, trust_env=False) as http:
                body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2}
                assert (await http.post("/v1/completions", json=body)).status_code == 200
        finally:
            for _, writer in idle:
                writer.close()
            process.end()
