-- Renew the lease on entries of one lane.
-- KEYS lane returned, then two of each entry: its output stream and its result
-- ARGV consumer-group consumer open-ttl-s lane-name, then the entries
-- -> the numbers (from 0) of the entries that were lost
local lost = {}
for i = 0, #ARGV - 5 do
  if owned(KEYS[1], ARGV[1], ARGV[i + 5], ARGV[2], KEYS[2], ARGV[4]) then
    -- A second entry of a finished job must not keep the stream of the first.
    if redis.call('EXISTS', KEYS[2 * i + 4]) == 0 then redis.call('EXPIRE', KEYS[2 * i + 3], ARGV[3]) end
  else
    lost[#lost + 1] = i
  end
end
return lost
