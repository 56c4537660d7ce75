"""How each router under measurement is started against the fake engines, and what it consumed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fake_engine import MODEL
from mooncake_core.index import Source, Stored, Tier
from mooncake_core.index.redis import RedisIndex
from mooncake_core.registry import EngineKind, Instance, Role, StaleEpochError
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake"
VLLM_ROUTER = "vllm-router==0.1.17"
# What its launcher imports without declaring it.
VLLM_ROUTER_NEEDS = ["setproctitle", "aiohttp", "orjson", "uvicorn", "fastapi", "requests"]
BLOCK_SIZE_TOKENS = 16
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def wait_listening(port: int, seconds: float = 10) -> None:
    """Until something accepts connections on the port."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class PeerMissingError(Exception):
    """A peer cannot be installed here; its row says so and the benchmark fails."""


@dataclass
class Engines:
    """Ports of the four fake engines."""

    ports: list[int]

    @property
    def prefill(self) -> list[int]:
        return self.ports[:2]

    @property
    def decode(self) -> list[int]:
        return self.ports[2:]


class RouterProcess:
    """A running router: its port and the CPU seconds of its whole process tree."""

    def __init__(
        self, command: list[str], port: int, log: Path, extra_env: dict[str, str] | None = None
    ) -> None:
        self.port = port
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env=os.environ | (extra_env or {})
        )

    async def wait_ready(self, path: str = "/v1/models", seconds: float = 60) -> None:
        """Until it answers 200, or raise with the end of its log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                await asyncio.to_thread(_get, f"http://127.0.0.1:{self.port}{path}")
                return
            except (urllib.error.URLError, OSError):
                await asyncio.sleep(0.2)
        tail = Path(self._log.name).read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{self.process.args} did not become ready:\n{tail}")

    def cpu_so_far_s(self) -> float:
        """CPU seconds of the process and its children until now."""
        return sum(cpu_of(pid) for pid in _tree(self.process.pid))

    def stop(self) -> float:
        """End it; its CPU seconds in all, as wait4 tells (children that it waited for included)."""
        children = [pid for pid in _tree(self.process.pid) if pid != self.process.pid]
        orphans = sum(cpu_of(pid) for pid in children)
        self.process.send_signal(signal.SIGTERM)
        for _ in range(100):
            pid, _status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.1)
        else:
            self.process.kill()
            _pid, _status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = 0
        self._log.close()
        # Children that were not waited for are not in rusage: count what they had when we looked.
        left = [pid for pid in children if Path(f"/proc/{pid}").exists()]
        return usage.ru_utime + usage.ru_stime + (orphans if left else 0.0)


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=1) as answer:
        answer.read()


def cpu_of(pid: int) -> float:
    """CPU seconds of a process until now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def ensure_vllm_router() -> str:
    """The peer's command, installed into an environment of its own outside the checkout."""
    place = CACHE / "bench-vllm-router"
    command = place / "bin" / "vllm-router"
    if not command.exists():
        try:
            subprocess.check_call([sys.executable, "-m", "venv", str(place)])
            pip = [str(place / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            subprocess.check_call([*pip, VLLM_ROUTER, *VLLM_ROUTER_NEEDS])
        except subprocess.CalledProcessError as error:
            shutil.rmtree(place, ignore_errors=True)
            raise PeerMissingError(f"{VLLM_ROUTER} cannot be installed: {error}") from error
    return str(command)


@asynccontextmanager
async def _running(command: list[str], port: int, log: Path) -> AsyncIterator[RouterProcess]:
    router = RouterProcess(command, port, log)
    try:
        await router.wait_ready()
        yield router
    finally:
        if router.process.poll() is None:
            router.stop()


@asynccontextmanager
async def vllm_router(
    engines: Engines, *, disaggregated: bool, port: int, redis_url: str
) -> AsyncIterator[RouterProcess]:
    """The peer, policy round robin."""
    urls = [f"http://127.0.0.1:{p}" for p in engines.ports]
    command = [ensure_vllm_router(), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-port", str(port + 1)]
    command += ["--worker-startup-check-interval", "1", "--log-level", "error"]
    if disaggregated:
        command += ["--vllm-pd-disaggregation"]
        for p in engines.prefill:
            command += ["--prefill", f"http://127.0.0.1:{p}"]
        for p in engines.decode:
            command += ["--decode", f"http://127.0.0.1:{p}"]
    else:
        command += ["--worker-urls", *urls]
    with tempfile.TemporaryDirectory() as folder:
        async with _running(command, port, Path(folder) / "log") as router:
            yield router


@asynccontextmanager
async def ours(
    engines: Engines,
    *,
    disaggregated: bool,
    port: int,
    redis_url: str,
    extra_instances: int = 0,
    model_path: Path | None = None,
) -> AsyncIterator[RouterProcess]:
    """This project's scheduler: policy kv-centric; index, ledger and registry on Redis; metrics on."""
    namespace = f"bench-{port}"
    config = {
        "cluster": "bench", "model": MODEL, "namespace": namespace, "redis_url": redis_url,
        "serving": {"host": "127.0.0.1", "port": port}, "admin": {"host": "127.0.0.1", "port": port + 1},
        "model_path": None if model_path is None else str(model_path),
        # Admission computes what it always does; targets so wide that fake engines are never refused.
        "profile": "llama3-70b-8xa800", "slo": {"ttft_s": 300, "tbt_s": 10},
        "routing": {"policy": "kv-centric"}, "admission": {"mode": "predictive"}, "log_level": "error",
    }  # fmt: skip
    stop = asyncio.Event()
    instances = _instances(engines, disaggregated=disaggregated, extra=extra_instances)
    announcing = asyncio.create_task(_announce(redis_url, namespace, instances, stop))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scheduler.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "mooncake_scheduler", "--config", str(path)]
        try:
            async with _running(command, port, Path(folder) / "log") as router:
                yield router
        finally:
            stop.set()
            await announcing


@asynccontextmanager
async def floor(
    engines: Engines, *, disaggregated: bool, port: int, redis_url: str, step: str
) -> AsyncIterator[RouterProcess]:
    """Parts of this gateway's data path alone (`floor.STEPS`), nothing decided; regular requests only."""
    assert not disaggregated
    urls = [f"http://127.0.0.1:{p}" for p in engines.ports]
    script = str(Path(__file__).parent / "floor.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, str(port), step, redis_url, *urls]
        async with _running(command, port, Path(folder) / "log") as router:
            yield router


def _instances(engines: Engines, *, disaggregated: bool, extra: int) -> list[Instance]:
    def one(number: int, port: int, role: Role) -> Instance:
        return Instance(
            id=f"bench-{number}", role=role, url=f"http://127.0.0.1:{port}", cluster="bench", pool=str(role),
            model=MODEL, revision="1", engine=EngineKind.VLLM, engine_version="0.32.0",
            connector="NixlConnector" if disaggregated else "", block_size_tokens=BLOCK_SIZE_TOKENS,
            kv_capacity_tokens=1_400_000, max_model_len_tokens=131_072, max_batch=256,
        )  # fmt: skip

    ports = engines.ports * (1 + extra // len(engines.ports))
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE] if disaggregated else [Role.BOTH] * 4
    return [one(n, port, roles[n % 4]) for n, port in enumerate(ports)]


async def _announce(redis_url: str, namespace: str, instances: list[Instance], stop: asyncio.Event) -> None:
    """Play the sidecars: register, keep alive, and hold a few blocks in the index."""

    registry = RedisRegistry(redis_url, namespace=namespace)
    client = RespClient(redis_url)
    await client.connect()
    index = RedisIndex(client, namespace=namespace)
    registered = [await registry.register(instance) for instance in instances]
    for number, instance in enumerate(registered):
        source = Source(instance.id, instance.epoch)
        await index.attach(source)
        await index.apply(source, [Stored([number * 1000 + k for k in range(1, 200)], Tier.HBM)], 1)
    while not stop.is_set():
        for number, instance in enumerate(registered):
            try:
                await registry.heartbeat(instance.id, instance.epoch)
            except StaleEpochError:
                # On a machine busy with other work the heartbeats may have come too late.
                registered[number] = await registry.register(instance)
        try:
            await asyncio.wait_for(stop.wait(), 1)
        except TimeoutError:
            continue
    await client.close()
    await registry.close()
