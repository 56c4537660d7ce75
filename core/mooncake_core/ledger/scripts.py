"""The ledger in Redis: its keys, and the scripts that change them.

Below one prefix (a hash tag, so that all lie in one slot):

- `incs`            set of incarnations that have something to say
- `alive:<inc>`     heartbeat of an incarnation; it expires by Redis' own clock
- `row:<inc>`       hash: `gen` (which posting of the incarnation's table this is), and by instance `q:`
                    queued microseconds of prefill, `n:` requests promised to decode, `k:` their KV tokens,
                    `s:` those of them that decode, `t:` the KV tokens of these
- `queue:<inst>`    sorted set of prefills not finished at an instance: `<inc>|<reservation>|<microseconds>`,
                    by when they were handed to it; those whose turn has not come stand at +inf
- `since`           hash: since when the oldest prefill of an instance is the oldest (seconds)
- `snap:<inc>`      hash: `v` version and `b` msgpack of {instance: Share}: what peers show in `loads()`

Each incarnation writes its own row only, so a row can be replaced as a whole and the sums cannot drift. What
is sent under an older `gen` than the row's does nothing: after a stall or a lost connection the table is
posted again under a new one, and stragglers of the old one count no more.
"""

from __future__ import annotations

from mooncake_core.resp import Script

STALE = 9
"""Reply of a script whose incarnation was reaped, or whose table was posted again since."""
TAKEN, QUEUE_FULL, BATCH_FULL, KV_FULL, TAKEN_AND_WAITS = 0, 1, 2, 3, 4
"""Replies of RESERVE, MOVE and SEAT."""

_STRIKE = """
local function head(inst)
  return redis.call('ZRANGE', p .. 'queue:' .. inst, 0, 0)[1]
end
local function strike(inc, heads)
  local mine = inc .. '|'
  for _, field in ipairs(redis.call('HKEYS', p .. 'row:' .. inc)) do
    if string.sub(field, 1, 2) == 'q:' then
      local inst = string.sub(field, 3)
      local queue = p .. 'queue:' .. inst
      heads[inst] = heads[inst] or head(inst)
      for _, member in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
        if string.sub(member, 1, #mine) == mine then redis.call('ZREM', queue, member) end
      end
    end
  end
  redis.call('DEL', p .. 'row:' .. inc)
end
local function settle(heads, now)
  for inst, was in pairs(heads) do
    local is = head(inst)
    if not is then redis.call('HDEL', p .. 'since', inst)
    elseif is ~= was then redis.call('HSET', p .. 'since', inst, now) end
  end
end
"""

RESERVE = Script(
    """
local p, inc, gen, rid, queue, cost, decode, kv, now = KEYS[1], unpack(ARGV, 1, 8)
local most_queued, most_batch, most_kv = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local most_ahead = tonumber(ARGV[12])
local row = p .. 'row:' .. inc
if redis.call('HGET', row, 'gen') ~= gen then return 9 end
local queued, promised, tokens = 0, 0, 0
for _, each in ipairs(redis.call('SMEMBERS', p .. 'incs')) do
  local had = redis.call('HMGET', p .. 'row:' .. each, 'q:' .. queue, 'n:' .. decode, 'k:' .. decode)
  queued = queued + tonumber(had[1] or 0)
  promised = promised + tonumber(had[2] or 0)
  tokens = tokens + tonumber(had[3] or 0)
end
if most_queued >= 0 or most_ahead >= 0 then
  local first = redis.call('ZRANGE', p .. 'queue:' .. queue, 0, 0, 'WITHSCORES')
  if first[1] and first[2] ~= 'inf' then
    local since = tonumber(redis.call('HGET', p .. 'since', queue) or 0)
    local ran = math.floor((tonumber(now) - math.max(since, tonumber(first[2]))) * 1e6 + 0.5)
    queued = queued - math.min(tonumber(string.match(first[1], '|(%d+)$')), math.max(0, ran))
  end
  if most_queued >= 0 and queued + tonumber(cost) > most_queued then return 1 end
end
if most_batch > 0 and promised + 1 > most_batch then return 2 end
if most_kv > 0 and tokens + tonumber(kv) > most_kv then return 3 end
local handed_over, taken = now, 0
if most_ahead >= 0 then
  local last = redis.call('ZRANGE', p .. 'queue:' .. queue, -1, -1, 'WITHSCORES')
  if queued > most_ahead or last[2] == 'inf' then handed_over, taken = '+inf', 4 end
end
redis.call('ZADD', p .. 'queue:' .. queue, handed_over, inc .. '|' .. rid .. '|' .. cost)
redis.call('HINCRBY', row, 'q:' .. queue, cost)
redis.call('HINCRBY', row, 'n:' .. decode, 1)
redis.call('HINCRBY', row, 'k:' .. decode, kv)
return taken
"""
)
"""ARGV: inc, gen, reservation, queue instance, cost in microseconds, decode instance, KV tokens, now in
seconds, then the bounds: queued microseconds (-1 = none), batch (0 = none), KV tokens (0 = none); at last
the queued microseconds above which it waits for its turn (-1 = it never does)."""

MOVE = Script(
    """
local p, inc, gen, rid, now, was, was_cost, queue, cost, most_ahead = KEYS[1], unpack(ARGV)
local row, name = p .. 'row:' .. inc, p .. 'queue:' .. queue
if redis.call('HGET', row, 'gen') ~= gen then return 9 end
local first = redis.call('ZRANGE', name, 0, 0, 'WITHSCORES')
if first[1] then
  local last = redis.call('ZRANGE', name, -1, -1, 'WITHSCORES')
  if last[2] == 'inf' then return 1 end
  local queued = 0
  for _, each in ipairs(redis.call('SMEMBERS', p .. 'incs')) do
    queued = queued + tonumber(redis.call('HGET', p .. 'row:' .. each, 'q:' .. queue) or 0)
  end
  local since = tonumber(redis.call('HGET', p .. 'since', queue) or 0)
  local ran = math.floor((tonumber(now) - math.max(since, tonumber(first[2]))) * 1e6 + 0.5)
  queued = queued - math.min(tonumber(string.match(first[1], '|(%d+)$')), math.max(0, ran))
  if queued <= 0 or queued > tonumber(most_ahead) then return 1 end
end
local line = p .. 'queue:' .. was
redis.call('ZREM', line, inc .. '|' .. rid .. '|' .. was_cost)
if redis.call('EXISTS', line) == 0 then redis.call('HDEL', p .. 'since', was) end
if redis.call('HINCRBY', row, 'q:' .. was, -was_cost) == 0 then redis.call('HDEL', row, 'q:' .. was) end
redis.call('ZADD', name, '+inf', inc .. '|' .. rid .. '|' .. cost)
redis.call('HINCRBY', row, 'q:' .. queue, cost)
return 0
"""
)
"""ARGV: inc, gen, reservation, now, the instance where it waits and its cost there in microseconds, the one
where it is to wait, its cost there, and most microseconds that may be ahead of it there."""

BEGIN = Script(
    """
local p, inc, gen, rid, now, queue, cost = KEYS[1], unpack(ARGV)
if redis.call('HGET', p .. 'row:' .. inc, 'gen') ~= gen then return 9 end
redis.call('ZADD', p .. 'queue:' .. queue, 'XX', now, inc .. '|' .. rid .. '|' .. cost)
return 0
"""
)
"""ARGV: inc, gen, reservation, now, queue instance, cost in microseconds."""

SEAT = Script(
    """
local p, inc, gen, was, decode, kv = KEYS[1], unpack(ARGV, 1, 5)
local most_batch, most_kv = tonumber(ARGV[6]), tonumber(ARGV[7])
local most_s, base_s = tonumber(ARGV[8]), tonumber(ARGV[9])
local request_s, token_s = tonumber(ARGV[10]), tonumber(ARGV[11])
local row = p .. 'row:' .. inc
if redis.call('HGET', row, 'gen') ~= gen then return 9 end
local batch, tokens = 0, 0
for _, each in ipairs(redis.call('SMEMBERS', p .. 'incs')) do
  local had = redis.call('HMGET', p .. 'row:' .. each, 's:' .. decode, 't:' .. decode)
  batch = batch + tonumber(had[1] or 0)
  tokens = tokens + tonumber(had[2] or 0)
end
if batch > 0 then
  if most_batch > 0 and batch + 1 > most_batch then return 2 end
  if most_s >= 0 and base_s + request_s * (batch + 1) + token_s * (tokens + tonumber(kv)) > most_s then
    return 2
  end
  if most_kv > 0 and tokens + tonumber(kv) > most_kv then return 3 end
end
local function add(field, by)
  if redis.call('HINCRBY', row, field, by) == 0 then redis.call('HDEL', row, field) end
end
if was ~= decode then
  add('n:' .. was, -1)
  add('k:' .. was, -tonumber(kv))
  add('n:' .. decode, 1)
  add('k:' .. decode, tonumber(kv))
end
add('s:' .. decode, 1)
add('t:' .. decode, tonumber(kv))
return 0
"""
)
"""ARGV: inc, gen, decode instance that was promised, the one to decode at, KV tokens, then the bounds there:
batch (0 = none), KV tokens (0 = none), seconds of a step (-1 = none) and what a step, a request of its batch
and a token of KV take of them."""

END = Script(
    """
local p, inc, gen, rid, now, queue, cost, decode, kv, starts, ends = KEYS[1], unpack(ARGV)
local row = p .. 'row:' .. inc
if redis.call('HGET', row, 'gen') ~= gen then return 9 end
local function less(field, by)
  if redis.call('HINCRBY', row, field, -by) == 0 then redis.call('HDEL', row, field) end
end
if queue ~= '' then
  local name, member = p .. 'queue:' .. queue, inc .. '|' .. rid .. '|' .. cost
  local rank = redis.call('ZRANK', name, member)
  redis.call('ZREM', name, member)
  less('q:' .. queue, cost)
  if redis.call('EXISTS', name) == 0 then redis.call('HDEL', p .. 'since', queue)
  elseif rank == 0 then redis.call('HSET', p .. 'since', queue, now) end
end
if starts == '1' then
  redis.call('HINCRBY', row, 's:' .. decode, 1)
  redis.call('HINCRBY', row, 't:' .. decode, kv)
end
if ends ~= '' then
  less('n:' .. decode, 1)
  less('k:' .. decode, kv)
end
if ends == 'decode' then
  less('s:' .. decode, 1)
  less('t:' .. decode, kv)
end
return 0
"""
)
"""ARGV: inc, gen, reservation, now, queue instance and cost (where the prefill ends, else empty), decode
instance and KV tokens, 1 where decode starts, and where the request ends: `decode` where it was decoding,
`promise` where it was not, else empty."""

POST = Script(
    "local p, inc, gen, ttl_ms = KEYS[1], unpack(ARGV, 1, 3)"
    + _STRIKE
    + """
local row, table = p .. 'row:' .. inc, cmsgpack.unpack(ARGV[4])
local heads = {}
strike(inc, heads)
redis.call('SADD', p .. 'incs', inc)
redis.call('SET', p .. 'alive:' .. inc, 1, 'PX', ttl_ms)
redis.call('HSET', row, 'gen', gen)
for _, entry in ipairs(table[1]) do
  local member = inc .. '|' .. entry[3] .. '|' .. entry[4]
  redis.call('ZADD', p .. 'queue:' .. entry[1], entry[2], member)
  redis.call('HINCRBY', row, 'q:' .. entry[1], entry[4])
end
for _, entry in ipairs(table[2]) do
  redis.call('HSET', row, 'n:' .. entry[1], entry[2], 'k:' .. entry[1], entry[3])
  if entry[4] > 0 then redis.call('HSET', row, 's:' .. entry[1], entry[4], 't:' .. entry[1], entry[5]) end
end
for _, entry in ipairs(table[3]) do
  local had = tonumber(redis.call('HGET', p .. 'since', entry[1]) or 0)
  if had < tonumber(entry[2]) then redis.call('HSET', p .. 'since', entry[1], entry[2]) end
  heads[entry[1]] = heads[entry[1]] or ''
end
for inst, _ in pairs(heads) do
  if not head(inst) then redis.call('HDEL', p .. 'since', inst) end
end
return 0
"""
)
"""ARGV: inc, gen, heartbeat's life in ms, and msgpack of [[queue instance, handed over at, reservation,
microseconds], …], [[decode instance, requests, KV tokens, requests that decode, KV tokens of these], …],
[[queue instance, since], …], numbers of the first and the last as text. Replaces all that the incarnation
holds."""

BEAT = Script(
    "local p, inc, gen, ttl_ms, now, version, snapshot = KEYS[1], unpack(ARGV, 1, 6)"
    + _STRIKE
    + """
if redis.call('HGET', p .. 'row:' .. inc, 'gen') ~= gen then return 9 end
redis.call('SET', p .. 'alive:' .. inc, 1, 'PX', ttl_ms)
if snapshot ~= '' then redis.call('HSET', p .. 'snap:' .. inc, 'v', version, 'b', snapshot) end
local known, heads, out = {}, {}, {}
for i = 7, #ARGV, 2 do known[ARGV[i]] = ARGV[i + 1] end
for _, each in ipairs(redis.call('SMEMBERS', p .. 'incs')) do
  if each ~= inc then
    if redis.call('EXISTS', p .. 'alive:' .. each) == 0 then
      strike(each, heads)
      redis.call('DEL', p .. 'snap:' .. each)
      redis.call('SREM', p .. 'incs', each)
    else
      local is = redis.call('HGET', p .. 'snap:' .. each, 'v') or ''
      out[#out + 1] = each
      out[#out + 1] = is
      out[#out + 1] = is ~= (known[each] or '') and redis.call('HGET', p .. 'snap:' .. each, 'b') or ''
    end
  end
end
settle(heads, now)
return {redis.call('HGETALL', p .. 'since'), out}
"""
)
"""ARGV: inc, gen, heartbeat's life in ms, now, own snapshot's version and bytes (empty = unchanged), then
pairs of peer and the version known of it. Reaps the dead; replies the hash `since`, and triples of peer,
version, snapshot (empty = known)."""

LEAVE = Script(
    "local p, inc, now = KEYS[1], unpack(ARGV)"
    + _STRIKE
    + """
local heads = {}
strike(inc, heads)
settle(heads, now)
redis.call('DEL', p .. 'snap:' .. inc, p .. 'alive:' .. inc)
redis.call('SREM', p .. 'incs', inc)
return 0
"""
)
"""ARGV: inc, now."""
