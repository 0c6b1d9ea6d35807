-- Hand an entry back: its idle time is `idle_ms` now, so that another worker takes it over once that time reaches a lease.
-- KEYS lane job returned
-- ARGV request {consumer_group, consumer, lane, entry, idle_ms, due_in_ms, graceful, count_start}
--      due_in_ms: the next READ after that time takes the entry; absent: only sweeps find it. graceful: a job that this
--      consumer started is queued again, and its next START counts no death. count_start: this start counts against max_attempts.
-- -> OK | LOST | AGAIN key …
local lane, job, returned = KEYS[1], KEYS[2], KEYS[3]
local request = cjson.decode(ARGV[1])
local consumer, entry = request.consumer, request.entry

local held = redis.call('HMGET', job, 'state', 'lane', 'entry', 'worker', 'tries', 'tenant')
local started = held[1] == 'running' and held[2] == request.lane and held[3] == entry and held[4] == consumer
local running = started and request.graceful and count_keys(held[6] or '', '').running
local again = running and undeclared({ running })
if again then return again end
if not owned(lane, returned, request) then return 'LOST' end
redis.call('XCLAIM', lane, request.consumer_group, consumer, 0, entry, 'IDLE', request.idle_ms, 'JUSTID')
if request.due_in_ms then list_returned(returned, request.lane, entry, request.due_in_ms) end
if started then redis.call('HDEL', job, 'excused') end
if started and request.graceful then
  redis.call('HSET', job, 'state', 'queued')
  if running then redis.call('SREM', running, request.lane .. ' ' .. entry) end
  if not request.count_start and tonumber(held[5] or '0') > 0 then redis.call('HINCRBY', job, 'tries', -1) end
end
return 'OK'
