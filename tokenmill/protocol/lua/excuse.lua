#!lua flags=allow-oom
-- Mark a running job as excused: its worker was asked to shut down. If the worker ends before the job, however it ends,
-- neither the start nor the death counts.
-- KEYS lane job returned
-- ARGV request {consumer_group, consumer, lane, entry}
-- -> OK | LOST
local lane, job, returned = KEYS[1], KEYS[2], KEYS[3]
local request = cjson.decode(ARGV[1])

if not owned(lane, returned, request) then return 'LOST' end
local held = redis.call('HMGET', job, 'state', 'lane', 'entry', 'worker')
if held[1] ~= 'running' or held[2] ~= request.lane or held[3] ~= request.entry or held[4] ~= request.consumer then
  return 'LOST'
end
redis.call('HSET', job, 'excused', request.consumer)
return 'OK'
