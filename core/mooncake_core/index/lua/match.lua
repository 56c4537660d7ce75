-- How deep each holder has each prefix: the search of gallop.py. ARGV: seed of the places looked at for holes,
-- number of these, most looks a prefix, deepest holders wanted, then the keys of each prefix, 8 bytes a key.
-- Returns for each prefix: looks, holes, overflows, then instance, HBM, DRAM and SSD depth of each holder.
local checks, most_looks, deepest_wanted = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local WALK = 32 -- so short a prefix is walked: exact, and as cheap
math.randomseed(tonumber(ARGV[1]))

-- By tiers: 3 = held in HBM, 2 = in DRAM at best, 1 = in SSD. Depths count by classes at least so high.
local CLASS = {[0] = 0, 3, 2, 3, 1, 3, 2, 3}

local function candidates_of(words)
  local names, index_of, slots = {}, {}, {}
  for at = 1, #words - 1, 2 do
    if sub(words, at, at + 1) ~= OVERFLOW then
      slots[#slots + 1] = slot_of(byte(words, at), byte(words, at + 1))
    end
  end
  if #slots == 0 then return names, index_of end
  local live = call('HMGET', root .. ':live', unpack(slots))
  for n, slot in ipairs(slots) do
    if live[n] then
      names[#names + 1] = live[n]
      index_of[8 * slot] = #names
    end
  end
  return names, index_of
end

local function match(keys)
  local length = #keys / 8
  local looks, holes, overflows = 0, 0, 0
  local function words_at(position)
    local bucket, field = place(sub(keys, 8 * position + 1, 8 * position + 8))
    looks = looks + 1
    return call('HGET', bucket, field) or ''
  end

  local first = words_at(0)
  local names, index_of = candidates_of(first)
  local nothing = {}
  for n = 1, #names do nothing[n] = 0 end
  local parsed = {[''] = nothing}
  local seen = {[length] = nothing} -- position -> class of each candidate
  local function look(position)
    local words = position == 0 and first or words_at(position)
    local classes = parsed[words]
    if not classes then
      classes = {unpack(nothing)}
      for at = 1, #words - 1, 2 do
        local word_low, word_high = byte(words, at, at + 1)
        local tiers = word_low % 8
        local n = index_of[word_low - tiers + 256 * word_high]
        if n then classes[n] = CLASS[tiers] end
      end
      if sub(words, -2) == OVERFLOW then overflows = 1 end
      parsed[words] = classes
    end
    seen[position] = classes
    return classes
  end

  local function any_lost(before, after)
    if before == after then return false end
    for n = 1, #before do
      if before[n] > after[n] then return true end
    end
    return false
  end

  local function both(before, after)
    local least
    for n = 1, #before do
      if before[n] < after[n] then
        least = least or {unpack(after)}
        least[n] = before[n]
      end
    end
    return least or after
  end

  -- Halves the interval while its ends differ, deepest part first; `ended` holders are known to end there.
  local ended = 0
  local function narrow(from, at_from, to)
    if to - from < 2 or looks >= most_looks or ended >= deepest_wanted then
      if to - from == 1 then
        for n = 1, #at_from do
          if at_from[n] > 0 and seen[to][n] == 0 then ended = ended + 1 end
        end
      end
      return
    end
    if not any_lost(at_from, seen[to]) then return end
    local middle = floor((from + to) / 2)
    local at_middle = look(middle)
    narrow(middle, both(at_from, at_middle), to)
    narrow(from, at_from, middle)
  end

  local function looked_at()
    local positions = {}
    for position in pairs(seen) do
      if position < length then positions[#positions + 1] = position end
    end
    table.sort(positions)
    return positions
  end

  local function check_for_holes()
    local positions, deepest = looked_at(), 0
    for _, position in ipairs(positions) do
      if any_lost(seen[position], nothing) then deepest = position end
    end
    ended = 0
    for _ = 1, checks do
      local position, before = math.random(0, deepest), 0
      if not seen[position] and looks < most_looks then
        for _, known in ipairs(positions) do
          if known > position then break end
          before = known
        end
        look(position)
        narrow(before, seen[before], position)
      end
    end
  end

  local function depths()
    local depth, hole = {}, 0
    local start = seen[0]
    local least = {unpack(start)}
    for n = 1, #names do depth[n] = {0, 0, 0} end
    local previous, classes_before = 0, start
    local positions = looked_at()
    positions[#positions + 1] = length
    for _, position in ipairs(positions) do
      local classes = seen[position]
      if classes ~= classes_before then
        for n = 1, #names do
          local now, before = classes[n], least[n]
          if now < before then
            for class = now + 1, before do depth[n][class] = previous + 1 end
            least[n] = now
          elseif now > before and start[n] > before then
            hole = 1
          end
        end
        classes_before = classes
      end
      previous = position
    end
    return depth, hole
  end

  if #names == 0 then return {looks, 0, sub(first, -2) == OVERFLOW and 1 or 0} end
  local left = look(0)
  if length <= WALK then
    for position = 1, length - 1 do
      if not any_lost(left, nothing) then break end
      left = both(left, look(position))
    end
  else
    narrow(0, left, length)
    check_for_holes()
  end

  local depth, hole = depths()
  local answer = {looks, hole, overflows}
  for n, name in ipairs(names) do
    answer[#answer + 1] = name
    for class = 3, 1, -1 do answer[#answer + 1] = depth[n][class] end
  end
  return answer
end

local answers = {}
for at = 5, #ARGV do answers[#answers + 1] = match(ARGV[at]) end
return answers
