-- Changes of one life, in order. ARGV: instance, epoch, sequence, last ('1': this call ends the batch), most
-- holders to list, blocks a bucket, then pairs of tiers (negative: removed) and keys of 8 bytes each.
-- Returns the last sequence applied, or nil where the epoch is not the attached one.
local instance, sequence = ARGV[1], tonumber(ARGV[3])
local most_bytes, per_bucket = 2 * tonumber(ARGV[5]), tonumber(ARGV[6])

local epoch, slot, applied = string.match(call('HGET', root .. ':sources', instance) or '', '^(%d+) (%d+) (%-?%d+)$')
if not epoch or tonumber(epoch) ~= tonumber(ARGV[2]) then return false end
if sequence <= tonumber(applied) then return tonumber(applied) end

local own_low, own_high = 8 * (slot % 32), floor(slot / 32)
local entries = tonumber(call('HGET', root, 'entries')) or 0
local entries_before = entries

-- Where the slot's word is, or where it belongs; and its tiers, nil where it is not there.
local function find(words)
  for at = 1, #words, 2 do
    local high = byte(words, at + 1)
    if high >= own_high then
      local word_low = byte(words, at)
      local tiers = word_low % 8
      if high > own_high or word_low - tiers > own_low then return at, nil end
      if word_low - tiers == own_low then return at, tiers end
    end
  end
  return #words + 1, nil
end

local function store(key, tier)
  local bucket, field = place(key)
  local fresh = char(own_low + tier, own_high)
  if call('HSETNX', bucket, field, fresh) == 1 then
    entries = entries + 1
    return
  end
  local words = call('HGET', bucket, field)
  local at, tiers = find(words)
  if tiers then
    local both = bit.bor(tiers, tier)
    if both == tiers then return end
    words = sub(words, 1, at - 1) .. char(own_low + both, own_high) .. sub(words, at + 2)
  elseif #words < most_bytes then
    words = sub(words, 1, at - 1) .. fresh .. sub(words, at)
  elseif sub(words, -2) ~= OVERFLOW then
    words = words .. OVERFLOW
  else
    return
  end
  call('HSET', bucket, field, words)
end

local function remove(key, tier)
  local bucket, field = place(key)
  local words = call('HGET', bucket, field)
  if not words then return end
  local at, tiers = find(words)
  if not tiers then return end
  local left = bit.band(tiers, 7 - tier)
  if left == tiers then return end
  local word = left > 0 and char(own_low + left, own_high) or ''
  words = sub(words, 1, at - 1) .. word .. sub(words, at + 2)
  if words == '' or words == OVERFLOW then
    call('HDEL', bucket, field)
    entries = entries - 1
  else
    call('HSET', bucket, field, words)
  end
end

local function put_all(bucket, fields)
  for from = 1, #fields, 1000 do
    call('HSET', bucket, unpack(fields, from, math.min(from + 999, #fields)))
  end
end

-- Writes both halves anew: deleting fields one by one is slower, and would leave a bucket that has outgrown
-- its compact form in the loose one.
-- Returns the number of blocks that it went through.
local function split()
  local source, target = root .. ':' .. (buckets - low), root .. ':' .. buckets
  local bit_value = 2 ^ (floor(math.log(low) / math.log(2) + 0.5) % 8)
  local shorter = known_bytes(low * 2) > known_bytes(low)
  local pairs_of_source = call('HGETALL', source)
  local kept, moved = {}, {}
  for at = 1, #pairs_of_source, 2 do
    local field = pairs_of_source[at]
    local half = floor(byte(field) / bit_value) % 2 == 1 and moved or kept
    half[#half + 1] = shorter and sub(field, 2) or field
    half[#half + 1] = pairs_of_source[at + 1]
  end
  if #moved > 0 or shorter then
    call('DEL', source)
    put_all(source, kept)
    put_all(target, moved)
  end
  buckets = buckets + 1
  if buckets == low * 2 then low = low * 2 end
  return #pairs_of_source / 2
end

for at = 7, #ARGV, 2 do
  local tier, keys = tonumber(ARGV[at]), ARGV[at + 1]
  for from = 1, #keys, 8 do
    local key = sub(keys, from, from + 7)
    if tier > 0 then store(key, tier) else remove(key, -tier) end
  end
end

local buckets_before, handled = buckets, 0
while entries > per_bucket * buckets and buckets < MOST_BUCKETS and handled < 1024 do
  handled = handled + split()
end
if buckets ~= buckets_before then call('HSET', root, 'buckets', buckets) end
if entries ~= entries_before then call('HSET', root, 'entries', entries) end
if ARGV[4] == '1' then
  call('HSET', root .. ':sources', instance, epoch .. ' ' .. slot .. ' ' .. ARGV[3])
  return sequence
end
return tonumber(applied)
