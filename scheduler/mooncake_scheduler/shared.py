"""What the schedulers of a cluster share through Redis."""

from __future__ import annotations

import contextlib
import time
from math import inf
from pathlib import Path

import structlog

from mooncake_core.config.base import ConfigError
from mooncake_core.config.scheduler import SchedulerConfig
from mooncake_core.index import RedisIndex
from mooncake_core.ledger import RedisLedger
from mooncake_core.registry.redis import RedisRegistry
from mooncake_core.resp import RespClient
from mooncake_scheduler.orphans import Orphans

_log = structlog.get_logger(__name__)

SWEEP_BUCKETS = 16
MEASURE_EVERY_S = 30.0
ORPHAN_PATIENCE_S = 300.0
"""Wall seconds after which the blocks of an instance without a registration are forgotten."""


class SharedState:
    """Index, ledger and registry on one Redis.

    Args:
        config: names Redis and the namespace of the keys.

    Raises:
        ConfigError: the URL is no Redis URL, or the password file cannot be read.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.redis_url is not None
        self._password_file = None if config.redis_password_file is None else Path(config.redis_password_file)
        self.password()
        namespace = config.namespace
        if set(namespace) & set("{}"):
            raise ConfigError(f"namespace: {namespace!r}: braces mark the hash tag of keys: leave them out")
        try:
            self.client = RespClient(config.redis_url, self.password)
        except ValueError as error:
            raise ConfigError(f"redis_url: {error}") from error
        self.index = RedisIndex(self.client, namespace=namespace)
        self.index_bytes: int | None = None
        """What the index takes in Redis, as when it was last measured; None = not known."""
        self._measured_s = -inf
        self._orphans = Orphans(ORPHAN_PATIENCE_S)
        self.ledger = RedisLedger(self.client, prefix=f"{{{namespace}}}:")
        self.registry = RedisRegistry(config.redis_url, namespace=namespace, password=self.password)

    def password(self) -> str | None:
        """Redis' password as it stands in its file now.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self._password_file is None:
            return None
        try:
            return self._password_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"redis_password_file: {self._password_file}: {error.strerror}") from error

    @property
    def away(self) -> bool:
        """Whether Redis cannot be reached now."""
        return not self.client.connected

    async def start(self) -> None:
        """Connect; without Redis the scheduler begins with what it has itself, and goes on trying."""
        try:
            await self.client.connect()
        except ConnectionError as error:
            _log.warning("Redis is away", error=str(error))

    async def sweep(self) -> None:
        """Clear away a little of what ended lives left in the index; end lives that nobody will end."""
        with contextlib.suppress(ConnectionError):
            await self.index.sweep(SWEEP_BUCKETS)
            registered = {instance.id for instance in await self.registry.instances()}
            for source in self._orphans.due(await self.index.sources(), registered, time.monotonic()):
                _log.warning("an instance is gone, its blocks are forgotten", instance=source.instance)
                await self.index.detach(source)

    async def measure(self) -> None:
        """See what the index takes in Redis, if it is time: a few dozen small calls."""
        now_s = time.monotonic()
        if now_s - self._measured_s < MEASURE_EVERY_S:
            return
        with contextlib.suppress(ConnectionError):
            self.index_bytes = await self.index.memory_bytes()
            self._measured_s = now_s

    async def close(self) -> None:
        """Leave."""
        await self.registry.close()
        await self.client.close()
