#!lua flags=allow-oom
-- Move an entry without a usable id to the dead letters: no key could hold its result.
-- KEYS lane dead returned
-- ARGV request {consumer_group, consumer, lane, entry, code, reason, truncated, maxlen}, id (any bytes), body (any bytes)
-- -> OK | LOST
local lane, dead, returned = KEYS[1], KEYS[2], KEYS[3]
local request, id, body = cjson.decode(ARGV[1]), ARGV[2], ARGV[3]

if not owned(lane, returned, request) then return 'LOST' end
redis.call('XADD', dead, 'MAXLEN', '~', request.maxlen, '*', 'id', id, 'lane', request.lane, 'entry', request.entry,
  'code', request.code, 'reason', request.reason, 'attempts', '0', 'body', body, 'truncated', request.truncated)
remove(lane, request.consumer_group, request.entry)
return 'OK'
