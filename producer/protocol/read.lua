-- Take up to `count` entries: half of them such that were handed back and are due, then new ones, the higher lane first.
-- KEYS meta high normal low returned
-- ARGV consumer-group consumer count
-- -> PAUSED, or the list of {lane-name, entry, fields} that were handed back and for each lane its list of {entry, fields}
local known = redis.call('HMGET', KEYS[1], 'paused', 'lease_ms')
if known[1] == '1' then return 'PAUSED' end
local lanes = { high = KEYS[2], normal = KEYS[3], low = KEYS[4] }
local left, taken = tonumber(ARGV[3]), { {} }

local function take_returned(most)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now_ms(), 'LIMIT', 0, most)) do
    redis.call('ZREM', KEYS[5], member)
    local name, entry = string.match(member, '^(%a+) ([%d-]+)$')
    -- What is not idle for a lease has found a holder in another way; what is gone is not claimed.
    local found = lanes[name] and redis.pcall('XCLAIM', lanes[name], ARGV[1], ARGV[2], known[2] or '30000', entry) or {}
    if not found.err and found[1] then
      taken[1][#taken[1] + 1] = { name, entry, found[1][2] }
      left = left - 1
    end
  end
end

-- Half of the places; of an odd number, that half which the clock says. More only where nothing is new: a tenant at its cap
-- may have any number of jobs that come back again and again, and they must not keep new ones of others out for ever.
local odd = tonumber(redis.call('TIME')[2]) % 2
take_returned(math.floor((left + odd) / 2))
for i = 2, 4 do
  taken[i] = {}
  if left > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', left, 'STREAMS', KEYS[i], '>')
    if reply and #reply > 0 then
      taken[i] = reply[1][2]
      left = left - #reply[1][2]
    end
  end
end
take_returned(left)
return taken
