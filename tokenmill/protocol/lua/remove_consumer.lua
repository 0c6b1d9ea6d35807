-- Delete a consumer from the consumer group of one stream, only if no entry is pending for it.
-- KEYS stream
-- ARGV request {consumer_group}, consumer (any bytes)
-- -> 1 if the group has no such consumer now, 0 if the consumer still holds entries
local stream = KEYS[1]
local request, wanted = cjson.decode(ARGV[1]), ARGV[2]

local consumers = redis.pcall('XINFO', 'CONSUMERS', stream, request.consumer_group)
if consumers.err then return 1 end
for _, consumer in ipairs(consumers) do
  local name, pending
  for i = 1, #consumer, 2 do
    if consumer[i] == 'name' then name = consumer[i + 1] end
    if consumer[i] == 'pending' then pending = consumer[i + 1] end
  end
  if name == wanted then
    if pending > 0 then return 0 end
    redis.call('XGROUP', 'DELCONSUMER', stream, request.consumer_group, wanted)
  end
end
return 1
