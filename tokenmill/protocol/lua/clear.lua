-- A suspect got past the place where its last run ended: what it died of so far is held against it no more.
-- KEYS lane job returned
-- ARGV consumer-group entry consumer lane-name fence
-- -> OK | LOST
if not owned(KEYS[1], ARGV[1], ARGV[2], ARGV[3], KEYS[3], ARGV[4]) then return 'LOST' end
local held = redis.call('HMGET', KEYS[2], 'state', 'lane', 'entry', 'fence', 'deaths')
if held[1] ~= 'running' or held[2] ~= ARGV[4] or held[3] ~= ARGV[2] or held[4] ~= ARGV[5] then return 'LOST' end
redis.call('HSET', KEYS[2], 'alone', '0', 'cleared', held[5] or '0')
return 'OK'
