-- Put callbacks whose next try is due back into the stream.
-- KEYS callbacks-delayed callbacks
-- ARGV limit
-- -> how many
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, ARGV[1])
for _, member in ipairs(due) do
  local attempts, id, url = string.match(member, '^(%d+) (%S+) (.+)$')
  if attempts then redis.call('XADD', KEYS[2], '*', 'id', id, 'url', url, 'attempts', attempts) end
  redis.call('ZREM', KEYS[1], member)
end
return #due
