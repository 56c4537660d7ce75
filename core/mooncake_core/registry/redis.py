"""The registry that all processes of a cluster share through Redis.

Keys, below one hash tag:

- `epochs`      hash: instance -> the last epoch given to it; outlives the instance
- `records`     hash: instance -> JSON of its record, its state included
- `alive:<id>`  the epoch of a live registration; expires by Redis' own clock unless a heartbeat comes
- `reports`     hash: instance -> JSON of its last report
- `born`        when this Redis was first asked; another one than before has lost its memory
- `version`     when the records last changed, so that a poll without news costs one short reply; a time and
                no counter, because a Redis that lost its memory would count the same numbers again
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, ReadOnlyError, RedisError

from mooncake_core.registry.contract import EngineReport, Instance, InstanceState, StaleEpochError
from mooncake_core.registry.memory import HEARTBEAT_TTL_S
from mooncake_core.resp import DemotedError, reply_error

_log = structlog.get_logger(__name__)

_REGISTER = """
local p, id, ttl_ms, joins = KEYS[1], ARGV[1], ARGV[2], ARGV[5]
local floor, resume = tonumber(ARGV[3]), tonumber(ARGV[4])
local alive = redis.call('GET', p .. 'alive:' .. id)
local record = redis.call('HGET', p .. 'records', id)
if joins == '1' and alive and record then return {tonumber(alive), record} end
local epoch = tonumber(redis.call('HGET', p .. 'epochs', id) or 0)
if resume > 0 and (epoch == 0 or epoch == resume) then epoch = resume
else epoch = math.max(epoch, floor) + 1 end
redis.call('HSET', p .. 'epochs', id, epoch)
redis.call('SET', p .. 'alive:' .. id, epoch, 'PX', ttl_ms)
redis.call('HSET', p .. 'records', id, ARGV[6])
redis.call('HDEL', p .. 'reports', id)
redis.call('SET', p .. 'version', table.concat(redis.call('TIME'), '.'))
return {epoch, ARGV[6]}
"""
_HEARTBEAT = """
local p, id, epoch, ttl_ms = KEYS[1], unpack(ARGV, 1, 3)
if redis.call('GET', p .. 'alive:' .. id) ~= epoch then return false end
local record = redis.call('HGET', p .. 'records', id)
if not record then return false end
redis.call('PEXPIRE', p .. 'alive:' .. id, ttl_ms)
if ARGV[4] ~= '' then redis.call('HSET', p .. 'reports', id, ARGV[4]) end
return cjson.decode(record).state or 'ready'
"""
_DEREGISTER = """
local p, id, epoch = KEYS[1], unpack(ARGV)
if redis.call('GET', p .. 'alive:' .. id) ~= epoch then return 0 end
redis.call('DEL', p .. 'alive:' .. id)
redis.call('HDEL', p .. 'records', id)
redis.call('HDEL', p .. 'reports', id)
redis.call('SET', p .. 'version', table.concat(redis.call('TIME'), '.'))
return 1
"""
_MARK = """
local p, id, state = KEYS[1], unpack(ARGV)
local record = redis.call('HGET', p .. 'records', id)
if not record or redis.call('EXISTS', p .. 'alive:' .. id) == 0 then return 0 end
local fields = cjson.decode(record)
if (fields.state or 'ready') ~= state then
  fields.state = state
  redis.call('HSET', p .. 'records', id, cjson.encode(fields))
  redis.call('SET', p .. 'version', table.concat(redis.call('TIME'), '.'))
end
return 1
"""
_LIST = """
local p, known = KEYS[1], ARGV[1]
redis.call('SETNX', p .. 'born', table.concat(redis.call('TIME'), '.'))
local born = redis.call('GET', p .. 'born')
for _, id in ipairs(redis.call('HKEYS', p .. 'records')) do
  if redis.call('EXISTS', p .. 'alive:' .. id) == 0 then
    redis.call('HDEL', p .. 'records', id)
    redis.call('HDEL', p .. 'reports', id)
    redis.call('SET', p .. 'version', table.concat(redis.call('TIME'), '.'))
  end
end
local version = redis.call('GET', p .. 'version') or ''
if version == known then return {born, version} end
local out = {born, version}
local records = redis.call('HGETALL', p .. 'records')
for i = 1, #records, 2 do
  out[#out + 1] = redis.call('HGET', p .. 'epochs', records[i])
  out[#out + 1] = records[i + 1]
end
return out
"""


class _PasswordFile(CredentialProvider):
    """Asks at every connect, so that a rotated Secret is picked up."""

    def __init__(self, password: Callable[[], str | None]) -> None:
        self._password = password

    def get_credentials(self) -> tuple[str]:
        try:
            return (self._password() or "",)
        except Exception as error:
            # As any other reason for which no connection can be made.
            raise RedisConnectionError(f"the password cannot be read: {error}") from error

    async def get_credentials_async(self) -> tuple[str]:
        return self.get_credentials()


class RedisRegistry:
    """Instances in Redis. Satisfies `Registry`; for the control path, not for the data path.

    When Redis has lost its memory, those listed before stay listed until they announce themselves again, at
    most as long as a registration lives without a heartbeat.

    Args:
        url: As redis-py takes it.
        namespace: Clusters that share a Redis have different ones; no braces.
        password: Instead of the one in the URL; a callable is asked at every connect.
        ttl_s: Wall seconds that a registration lives without a heartbeat.
        timeout_s: Wall seconds that Redis may take before a call raises ConnectionError.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        password: str | Callable[[], str | None] | None = None,
        ttl_s: float = HEARTBEAT_TTL_S,
        timeout_s: float = 2.0,
    ) -> None:
        if set(namespace) & set("{}"):
            raise ValueError(f"namespace {namespace!r}: braces mark the hash tag of its keys; leave them out")
        settings: dict[str, Any] = {}
        if callable(password):
            if password():
                settings["credential_provider"] = _PasswordFile(password)
        elif password:
            settings["password"] = password
        self._redis: Redis = Redis.from_url(
            url,
            # The time is bounded by `_asked`. With redis-py's own bound a cancellation may be lost: it sends
            # through `asyncio.wait_for`, which before Python 3.12 swallows one that comes as the send ends.
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),
            protocol=2,
            **settings,
        )
        self._key = f"mc:{{{namespace}}}:registry:"
        self._ttl_ms = int(ttl_s * 1000)
        self._scripts = {
            source: self._redis.register_script(source)
            for source in (_REGISTER, _HEARTBEAT, _DEREGISTER, _MARK, _LIST)
        }
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._born = b""
        self._version = b""
        self._instances: list[Instance] = []
        self._remembered: list[Instance] = []
        self._remembered_until_s = 0.0

    async def register(self, instance: Instance, *, resume_epoch: int = 0) -> Instance:
        return await self._register(instance, resume_epoch, joins=False)

    async def join(self, instance: Instance) -> Instance:
        return await self._register(instance, 0, joins=True)

    async def heartbeat(
        self, instance_id: str, epoch: int, report: EngineReport | None = None
    ) -> InstanceState:
        said = b"" if report is None else msgspec.json.encode(report)
        state = await self._run(_HEARTBEAT, instance_id, epoch, self._ttl_ms, said)
        if state is None:
            raise StaleEpochError(f"{instance_id}: epoch {epoch} is not the registered one")
        return InstanceState(state.decode())

    async def deregister(self, instance_id: str, epoch: int) -> None:
        await self._run(_DEREGISTER, instance_id, epoch)

    async def mark(self, instance_id: str, state: InstanceState) -> bool:
        return bool(await self._run(_MARK, instance_id, state.value))

    async def instances(self) -> Sequence[Instance]:
        born, version, *records = await self._run(_LIST, self._version)
        if born != self._born:
            self._remember(born)
        if records or version != self._version:
            found = [
                _readable(record, int(epoch))
                for epoch, record in zip(records[::2], records[1::2], strict=True)
            ]
            self._instances = sorted(filter(None, found), key=lambda instance: instance.id)
            self._version = version
        return self._with_remembered()

    def _remember(self, born: bytes) -> None:
        """Redis lost its memory: whoever was there has not left, and announces itself again."""
        if self._born:
            self._remembered = list(self._instances)
            self._remembered_until_s = time.monotonic() + self._ttl_s
        self._born = born

    def _with_remembered(self) -> list[Instance]:
        if not self._remembered:
            return list(self._instances)
        if time.monotonic() > self._remembered_until_s:
            self._remembered = []
            return list(self._instances)
        announced = {instance.id for instance in self._instances}
        missing = [instance for instance in self._remembered if instance.id not in announced]
        return sorted([*self._instances, *missing], key=lambda instance: instance.id)

    async def reports(self) -> dict[str, EngineReport]:
        said: dict[bytes, bytes] = await self._asked(self._redis.hgetall(f"{self._key}reports"))
        reports: dict[str, EngineReport] = {}
        for instance_id, report in said.items():
            with contextlib.suppress(msgspec.DecodeError):  # as `_readable`, but told every second
                reports[instance_id.decode()] = msgspec.json.decode(report, type=EngineReport)
        return reports

    async def close(self) -> None:
        """Drop the connections; registrations stay."""
        await self._redis.aclose()

    async def _register(self, instance: Instance, resume_epoch: int, *, joins: bool) -> Instance:
        record = msgspec.json.encode(msgspec.structs.replace(instance, epoch=0))
        epoch, kept = await self._run(
            _REGISTER, instance.id, self._ttl_ms, instance.epoch, resume_epoch, int(joins), record
        )
        try:
            return _with_epoch(kept, epoch)
        except msgspec.DecodeError as error:
            raise ConnectionError(
                f"the registry's record of {instance.id} cannot be read: {error}"
            ) from error

    async def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        return await self._asked(self._scripts[script](keys=[self._key], args=list(arguments)))

    async def _asked(self, question: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await question
        except TimeoutError:
            raise ConnectionError(
                f"the registry in Redis did not answer within {self._timeout_s:g} s"
            ) from None
        except RedisError as error:
            raise await self._as_connection_error(error) from error

    async def _as_connection_error(self, error: RedisError) -> ConnectionError:
        if isinstance(error, ReadOnlyError | MasterDownError) or isinstance(
            reply_error(str(error)), DemotedError
        ):
            # Behind one name stands another primary now, and these connections would never lead there.
            await self._redis.connection_pool.disconnect(inuse_connections=False)
        return ConnectionError(f"the registry in Redis cannot be used: {error}")


def _with_epoch(record: bytes, epoch: int) -> Instance:
    return msgspec.structs.replace(msgspec.json.decode(record, type=Instance), epoch=epoch)


def _readable(record: bytes, epoch: int) -> Instance | None:
    """One record; None where a newer version wrote what this one cannot read: it must not hide the others."""
    try:
        return _with_epoch(record, epoch)
    except msgspec.DecodeError as error:
        _log.warning(
            "an instance is left out: its record cannot be read", record=record[:200], error=str(error)
        )
        return None
