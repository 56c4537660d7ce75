"""What others than schedulers may ask of the shared ledger."""

from __future__ import annotations

from mooncake_core.resp import ReplyError, RespClient, Script


def ledger_prefix(namespace: str) -> str:
    """The prefix under which the ledger of a namespace lies (`RedisLedger`'s argument)."""
    return f"{{{namespace}}}:"


_PROMISED = Script(
    """
local p, inst = KEYS[1], ARGV[1]
local prefills, decodes = redis.call('ZCARD', p .. 'queue:' .. inst), 0
for _, inc in ipairs(redis.call('SMEMBERS', p .. 'incs')) do
  decodes = decodes + tonumber(redis.call('HGET', p .. 'row:' .. inc, 'n:' .. inst) or 0)
end
return {prefills, decodes}
"""
)


async def promised(client: RespClient, *, prefix: str, instance: str) -> tuple[int, int]:
    """How many prefills and how many decodes all schedulers have promised to an instance.

    Raises:
        ConnectionError: Redis cannot be asked.
    """
    try:
        prefills, decodes = await client.eval(_PROMISED, [f"{prefix}ledger:"], [instance])
    except ReplyError as error:
        raise ConnectionError(f"Redis refuses the ledger: {error}") from error
    return prefills, decodes
