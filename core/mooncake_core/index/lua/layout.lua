-- The layout, put before each script of the index. KEYS[1] is the root, a hash:
--   buckets   number of buckets (absent: FIRST_BUCKETS)
--   entries   number of blocks
--   slots     slots ever given out
--   cursor    next bucket of the sweep that is under way
-- Beside it, all under the same hash tag:
--   <root>:<n>        bucket n, a hash: rest of the key -> words of its holders, by slot
--   <root>:sources    hash: instance -> "epoch slot sequence"
--   <root>:live       hash: slot -> instance
--   <root>:stale, <root>:sweeping    sets of slots whose life has ended; those that this sweep takes away
--   <root>:free       list of slots to be given out again
-- A word is 2 bytes: low byte = 8 * (slot % 32) + tiers (1 HBM, 2 DRAM, 4 SSD), high byte = slot / 32. The word
-- OVERFLOW says that the block has more holders than could be listed. Being the largest, it comes last.
local root = KEYS[1]
local call = redis.call
local byte, char, sub, floor = string.byte, string.char, string.sub, math.floor

local FIRST_BUCKETS = 256
local MOST_BUCKETS = 16777216
local MOST_SLOTS = 8191 -- the slot above them is the overflow's
local OVERFLOW = char(248, 255)

local buckets = tonumber(call('HGET', root, 'buckets')) or FIRST_BUCKETS
local low = 2 ^ floor(math.log(buckets) / math.log(2) + 1e-9)

-- A bucket of `width` buckets knows the low bits of its keys: whole bytes of these need not be stored again.
local function known_bytes(width)
  if width >= 16777216 then return 3 elseif width >= 65536 then return 2 else return 1 end
end

-- Linear hashing: the buckets before `buckets - low` are split already, one more bit of the key counts there.
local function place(key)
  local a, b, c = byte(key, 1, 3)
  local hash = a + 256 * b + 65536 * c
  local width = low
  local bucket = hash % low
  if bucket < buckets - low then
    width = low * 2
    bucket = hash % width
  end
  return root .. ':' .. bucket, sub(key, known_bytes(width) + 1)
end

local function slot_of(word_low, word_high)
  return floor(word_low / 8) + 32 * word_high
end
