-- Takes the words of ended lives out of some buckets. ARGV: number of buckets.
-- Returns how many ended lives still have a slot.
local stale, sweeping = root .. ':stale', root .. ':sweeping'
local slots = call('SMEMBERS', sweeping)
if #slots == 0 then
  if call('EXISTS', stale) == 0 then return 0 end
  call('RENAME', stale, sweeping)
  call('HSET', root, 'cursor', 0)
  slots = call('SMEMBERS', sweeping)
end
local gone = {}
for _, slot in ipairs(slots) do gone[tonumber(slot)] = true end

local removed = 0
local function clean(bucket)
  local pairs_of_bucket = call('HGETALL', bucket)
  for at = 1, #pairs_of_bucket, 2 do
    local words, left = pairs_of_bucket[at + 1], {}
    for word = 1, #words, 2 do
      if not gone[slot_of(byte(words, word), byte(words, word + 1))] then
        left[#left + 1] = sub(words, word, word + 1)
      end
    end
    if 2 * #left < #words then
      if #left == 0 or (#left == 1 and left[1] == OVERFLOW) then
        call('HDEL', bucket, pairs_of_bucket[at])
        removed = removed + 1
      else
        call('HSET', bucket, pairs_of_bucket[at], table.concat(left))
      end
    end
  end
end

local cursor = tonumber(call('HGET', root, 'cursor')) or 0
local stop = math.min(cursor + tonumber(ARGV[1]), buckets)
for bucket = cursor, stop - 1 do clean(root .. ':' .. bucket) end
if removed > 0 then call('HINCRBY', root, 'entries', -removed) end
if stop < buckets then
  call('HSET', root, 'cursor', stop)
  return #slots + call('SCARD', stale)
end
-- A split puts blocks behind the last bucket only: by now every bucket was looked at.
for from = 1, #slots, 1000 do -- Lua unpacks no more than 8 000 at once
  call('RPUSH', root .. ':free', unpack(slots, from, math.min(from + 999, #slots)))
end
call('DEL', sweeping)
return call('SCARD', stale)
