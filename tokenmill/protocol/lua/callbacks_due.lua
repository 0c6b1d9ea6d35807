-- Put callbacks whose next try is due back into the stream `callbacks`.
-- KEYS callbacks_delayed callbacks
-- ARGV request {limit}
-- -> the number of callbacks that were moved
local delayed, callbacks = KEYS[1], KEYS[2]
local request = cjson.decode(ARGV[1])

local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', now_ms(), 'LIMIT', 0, request.limit)
for _, member in ipairs(due) do
  local attempts, id, url = string.match(member, '^(%d+) (%S+) (.+)$')
  if attempts then redis.call('XADD', callbacks, '*', 'id', id, 'url', url, 'attempts', attempts) end
  redis.call('ZREM', delayed, member)
end
return #due
