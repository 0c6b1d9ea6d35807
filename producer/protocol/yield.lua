-- Hand an entry back: it looks idle for `idle-ms` from now on, so that others take it over once that reaches a lease.
-- KEYS lane job returned
-- ARGV consumer-group entry consumer lane-name idle-ms polite spare root due-in-ms ('' = found by sweeps alone)
-- -> OK | LOST. Polite: a job that this consumer started goes back to queued, and its next START counts no death. Spare: nor
-- does this start count.
if not owned(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) then return 'LOST' end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, ARGV[2], 'IDLE', ARGV[5], 'JUSTID')
if ARGV[9] ~= '' then list_returned(KEYS[3], ARGV[4], ARGV[2], tonumber(ARGV[9])) end
local held = redis.call('HMGET', KEYS[2], 'state', 'lane', 'entry', 'tries', 'worker', 'tenant')
if ARGV[6] == '1' and held[1] == 'running' and held[2] == ARGV[4] and held[3] == ARGV[2] and held[5] == ARGV[3] then
  redis.call('HSET', KEYS[2], 'state', 'queued')
  if held[6] then redis.call('SREM', ARGV[8] .. 'running:' .. held[6], ARGV[4] .. ' ' .. ARGV[2]) end
  if ARGV[7] == '1' and tonumber(held[4] or '0') > 0 then redis.call('HINCRBY', KEYS[2], 'tries', -1) end
end
return 'OK'
