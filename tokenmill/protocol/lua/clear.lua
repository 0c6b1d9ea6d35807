-- Clear a suspect: it ran past the progress of its last fence, so its deaths so far no longer count.
-- KEYS lane job returned
-- ARGV request {consumer_group, consumer, lane, entry, fence}
-- -> OK | LOST
local lane, job, returned = KEYS[1], KEYS[2], KEYS[3]
local request = cjson.decode(ARGV[1])

if not owned(lane, returned, request) then return 'LOST' end
local held = redis.call('HMGET', job, 'state', 'lane', 'entry', 'fence', 'deaths')
if held[1] ~= 'running' or held[2] ~= request.lane or held[3] ~= request.entry or held[4] ~= request.fence then
  return 'LOST'
end
redis.call('HSET', job, 'alone', '0', 'cleared', held[5] or '0')
return 'OK'
