-- Take up to `count` entries, the higher lane first; of each lane half of them such that were handed back and are due,
-- then new ones.
-- KEYS meta high normal low returned
-- ARGV consumer-group consumer count, then the words for a switched-on flag
-- -> PAUSED, or the list of {lane-name, entry, fields} that were handed back and for each lane its list of {entry, fields}
local known = redis.call('HMGET', KEYS[1], 'paused', 'lease_ms')
local word = known[1] and string.lower(string.match(known[1], '^%s*(.-)%s*$'))
for i = 4, #ARGV do
  if word == ARGV[i] then return 'PAUSED' end
end
local lanes, names = { high = KEYS[2], normal = KEYS[3], low = KEYS[4] }, { 'high', 'normal', 'low' }
local lease, left, taken = text(whole(known[2]) or 30000), tonumber(ARGV[3]), { {}, {}, {}, {} }

-- Of each lane those that are due, the oldest entry first.
local due = { high = {}, normal = {}, low = {} }
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now_ms(), 'LIMIT', 0, 512)) do
  local name, entry, ms, seq = string.match(member, '^(%a+) ((%d+)-(%d+))$')
  if lanes[name] then
    table.insert(due[name], { member = member, entry = entry, ms = tonumber(ms), seq = tonumber(seq) })
  else
    redis.call('ZREM', KEYS[5], member)
  end
end
for _, list in pairs(due) do
  table.sort(list, function(a, b) return a.ms < b.ms or (a.ms == b.ms and a.seq < b.seq) end)
end

local function take_returned(name, most)
  while most > 0 and #due[name] > 0 do
    local one = table.remove(due[name], 1)
    redis.call('ZREM', KEYS[5], one.member)
    -- What is not idle for a lease has found a holder in another way; what is gone is not claimed.
    local found = redis.pcall('XCLAIM', lanes[name], ARGV[1], ARGV[2], lease, one.entry)
    if not found.err and found[1] then
      table.insert(taken[1], { name, one.entry, found[1][2] })
      left, most = left - 1, most - 1
    end
  end
end

-- Half of the places; of an odd number, that half which the clock says. More only where nothing is new: a tenant at its cap
-- may have any number of jobs that come back again and again, and they must not keep new ones of others out for ever.
local odd = tonumber(redis.call('TIME')[2]) % 2
for i, name in ipairs(names) do
  take_returned(name, math.floor((left + odd) / 2))
  if left > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', left, 'STREAMS', lanes[name], '>')
    if reply and #reply > 0 then
      taken[i + 1] = reply[1][2]
      left = left - #reply[1][2]
    end
  end
end
for _, name in ipairs(names) do take_returned(name, left) end
return taken
