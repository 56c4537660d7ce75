-- Lives of instances. ARGV: 'attach' or 'detach', instance, epoch.
-- Returns 1, 0 where the epoch is older than the attached one, -1 where all slots are taken.
local action, instance, epoch = ARGV[1], ARGV[2], tonumber(ARGV[3])

local known = call('HGET', root .. ':sources', instance)
if known then
  local known_epoch, slot = string.match(known, '^(%d+) (%d+) ')
  known_epoch = tonumber(known_epoch)
  if action == 'detach' and known_epoch ~= epoch then return 0 end
  if action == 'attach' and known_epoch > epoch then return 0 end
  if action == 'attach' and known_epoch == epoch then return 1 end
  call('HDEL', root .. ':sources', instance)
  call('HDEL', root .. ':live', slot)
  call('SADD', root .. ':stale', slot)
end
if action == 'detach' then return 1 end

local slot = call('LPOP', root .. ':free')
if not slot then
  slot = tonumber(call('HGET', root, 'slots')) or 0
  if slot >= MOST_SLOTS then return -1 end
  call('HSET', root, 'slots', slot + 1)
end
call('HSET', root .. ':sources', instance, ARGV[3] .. ' ' .. slot .. ' -1')
call('HSET', root .. ':live', slot, instance)
return 1
