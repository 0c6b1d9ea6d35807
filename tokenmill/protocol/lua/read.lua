-- Take up to `count` entries, higher lanes first. In each lane, half of the places go to entries that were handed back and
-- are due, the other half to new entries.
-- KEYS meta high normal low returned
-- ARGV request {consumer_group, consumer, count, on}. `on`: the words for a flag that is switched on.
-- -> PAUSED | the list of {lane_name, entry, fields} that were handed back, then for each lane the list of {entry, fields}
local meta, high, normal, low, returned = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes, names = { high = high, normal = normal, low = low }, { 'high', 'normal', 'low' }
local request = cjson.decode(ARGV[1])

local known = redis.call('HMGET', meta, 'paused', 'lease_ms')
local paused = known[1] and string.lower(string.match(known[1], '^%s*(.-)%s*$'))
for _, word in ipairs(request.on) do
  if paused == word then return 'PAUSED' end
end
local lease, left, taken = text(whole(known[2]) or 30000), request.count, { {}, {}, {}, {} }

-- The due entries of each lane, the oldest entry first.
local due = { high = {}, normal = {}, low = {} }
for _, member in ipairs(redis.call('ZRANGEBYSCORE', returned, '-inf', now_ms(), 'LIMIT', 0, 512)) do
  local name, entry, ms, seq = string.match(member, '^(%a+) ((%d+)-(%d+))$')
  if lanes[name] then
    table.insert(due[name], { member = member, entry = entry, ms = tonumber(ms), seq = tonumber(seq) })
  else
    redis.call('ZREM', returned, member)
  end
end
for _, list in pairs(due) do
  table.sort(list, function(a, b) return a.ms < b.ms or (a.ms == b.ms and a.seq < b.seq) end)
end

local function take_returned(name, most)
  while most > 0 and #due[name] > 0 do
    local first = table.remove(due[name], 1)
    redis.call('ZREM', returned, first.member)
    -- An entry that is not idle for a lease was taken over by a sweep; a deleted entry is not claimed.
    local found = redis.pcall('XCLAIM', lanes[name], request.consumer_group, request.consumer, lease, first.entry)
    if not found.err and found[1] then
      table.insert(taken[1], { name, first.entry, found[1][2] })
      left, most = left - 1, most - 1
    end
  end
end

-- Half of the places; the clock decides which half an odd place goes to. Returned entries get more only where no new entry
-- waits: a tenant at its cap may have any number of jobs that are handed back again and again, which must not starve new jobs.
local odd = tonumber(redis.call('TIME')[2]) % 2
for i, name in ipairs(names) do
  take_returned(name, math.floor((left + odd) / 2))
  if left > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', request.consumer_group, request.consumer, 'COUNT', left, 'STREAMS',
      lanes[name], '>')
    if reply and #reply > 0 then
      taken[i + 1] = reply[1][2]
      left = left - #reply[1][2]
    end
  end
end
for _, name in ipairs(names) do take_returned(name, left) end
return taken
