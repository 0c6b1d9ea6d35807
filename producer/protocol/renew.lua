-- Renew the lease on entries of one lane.
-- KEYS lane, then the output stream of each entry
-- ARGV consumer-group consumer open-ttl-s, then the entries
-- -> the numbers (from 0) of the entries that were lost
local lost = {}
for i = 2, #KEYS do
  if owned(KEYS[1], ARGV[1], ARGV[i + 2], ARGV[2]) then
    redis.call('EXPIRE', KEYS[i], ARGV[3])
  else
    lost[#lost + 1] = i - 2
  end
end
return lost
