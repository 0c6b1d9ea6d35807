-- Delete a consumer from one lane's group, only while nothing is pending for it.
-- KEYS lane
-- ARGV consumer-group consumer
-- -> 1 where it is gone, 0 where it still holds entries
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err then return 1 end
for _, consumer in ipairs(consumers) do
  local name, pending
  for i = 1, #consumer, 2 do
    if consumer[i] == 'name' then name = consumer[i + 1] end
    if consumer[i] == 'pending' then pending = consumer[i + 1] end
  end
  if name == ARGV[2] then
    if pending > 0 then return 0 end
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  end
end
return 1
