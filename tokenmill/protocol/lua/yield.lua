-- Hand an entry back: it looks idle for `idle-ms` from now on, so that others take it over once that reaches a lease.
-- KEYS lane job returned
-- ARGV consumer-group entry consumer lane-name idle-ms polite spare due-in-ms ('' = found by sweeps alone)
-- -> OK | LOST | AGAIN key …. Polite: a job that this consumer started goes back to queued, and its next START counts no
-- death. Spare: nor does this start count.
local held = redis.call('HMGET', KEYS[2], 'state', 'lane', 'entry', 'worker', 'tries', 'tenant')
local started = held[1] == 'running' and held[2] == ARGV[4] and held[3] == ARGV[2] and held[4] == ARGV[3]
local running = started and ARGV[6] == '1' and count_keys(held[6] or '', '').running
local again = running and undeclared({ running })
if again then return again end
if not owned(KEYS[1], ARGV[1], ARGV[2], ARGV[3], KEYS[3], ARGV[4]) then return 'LOST' end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[2], 'IDLE', ARGV[5], 'JUSTID')
if ARGV[8] ~= '' then list_returned(KEYS[3], ARGV[4], ARGV[2], tonumber(ARGV[8])) end
if started then redis.call('HDEL', KEYS[2], 'excused') end
if started and ARGV[6] == '1' then
  redis.call('HSET', KEYS[2], 'state', 'queued')
  if running then redis.call('SREM', running, ARGV[4] .. ' ' .. ARGV[2]) end
  if ARGV[7] == '1' and tonumber(held[5] or '0') > 0 then redis.call('HINCRBY', KEYS[2], 'tries', -1) end
end
return 'OK'
