-- Renew the leases of entries in one lane.
-- KEYS lane returned, then for each entry its output stream and its result
-- ARGV request {consumer_group, consumer, lane, entries, open_ttl_s}
-- -> the numbers (from 0) of the entries that were lost
local lane, returned = KEYS[1], KEYS[2]
local request = cjson.decode(ARGV[1])

local lost = {}
for i, entry in ipairs(request.entries) do
  local out, result = KEYS[2 * i + 1], KEYS[2 * i + 2]
  request.entry = entry
  if owned(lane, returned, request) then
    -- A second entry of a job that has ended must not keep the stream alive.
    if redis.call('EXISTS', result) == 0 then redis.call('EXPIRE', out, request.open_ttl_s) end
  else
    lost[#lost + 1] = i - 1
  end
end
return lost
