#!lua flags=allow-oom
-- The worker of this running job was told to end: if it ends before the job, by whatever signal, that is not the job's fault.
-- KEYS lane job returned
-- ARGV consumer-group entry consumer lane-name
-- -> OK | LOST
if not owned(KEYS[1], ARGV[1], ARGV[2], ARGV[3], KEYS[3], ARGV[4]) then return 'LOST' end
local held = redis.call('HMGET', KEYS[2], 'state', 'lane', 'entry', 'worker')
if held[1] ~= 'running' or held[2] ~= ARGV[4] or held[3] ~= ARGV[2] or held[4] ~= ARGV[3] then return 'LOST' end
redis.call('HSET', KEYS[2], 'excused', ARGV[3])
return 'OK'
