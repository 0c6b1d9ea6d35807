#!lua flags=allow-oom
-- Look whether a job without a result still has its entry. Where somebody deleted that, the job ends as cancelled: its
-- readers hear of it, and it is counted no more.
-- KEYS open job result cancel out delayed-job delayed callbacks meta high normal low
-- ARGV id json result-ttl stream-ttl grace-ms
-- -> LIVE | KNOWN (it has ended, or waits as a delayed job) | MISSING (since less than `grace-ms`, or an entry that is not
--    read yet may be a second one of this id) | DONE | AGAIN key …
local index, job, id = KEYS[1], KEYS[2], ARGV[1]
local lanes = { high = KEYS[10], normal = KEYS[11], low = KEYS[12] }

local score = tonumber(redis.call('ZSCORE', index, id) or '')
local held = redis.call('HMGET', job, 'lane', 'entry', 'tenant', 'group', 'callback', 'stream')
if not score or not held[2] or held[2] == '' or redis.call('EXISTS', KEYS[3]) == 1 or redis.call('EXISTS', KEYS[6]) == 1 then
  redis.call('ZREM', index, id)
  return 'KNOWN'
end
if lanes[held[1]] and live(lanes[held[1]], held[2]) then
  open_job(index, id)
  return 'LIVE'
end
if score >= 0 then
  redis.call('ZADD', index, text(-now_ms()), id)
  return 'MISSING'
end
local entries = redis.call('XLEN', KEYS[10]) + redis.call('XLEN', KEYS[11]) + redis.call('XLEN', KEYS[12])
if now_ms() + score < tonumber(ARGV[5]) then return 'MISSING' end
-- Somebody may have moved the job by hand: added it again, with a bare XADD, before its first entry was deleted. As long as
-- there are more entries than jobs known to have one, one of them may be that.
if entries > redis.call('ZCOUNT', index, 0, '+inf') then return 'MISSING' end

local tenant, group = held[3] or '', held[4] or ''
local keys = count_keys(tenant, group)
local again = undeclared(keys.all)
if again then return again end
local result_ttl, stream_ttl = lives(KEYS[9], ARGV[3], ARGV[4])
clear_foreign(job, KEYS[5])
open({ job = job, out = KEYS[5], worker = '', prompt_tokens = '0', group_name = group, tenant = tenant })
finish({ job = job, result = KEYS[3], cancel = KEYS[4], out = KEYS[5], quota = keys.quota, booked = keys.booked,
  running = keys.running, group = keys.group, group_out = keys.group_out, callbacks = KEYS[8], open = index, id = id,
  status = 'cancelled', json = completed(ARGV[2], job), stream = held[6] or '1', result_ttl = result_ttl,
  stream_ttl = stream_ttl, tenant = tenant, group_name = group, callback = held[5] or '', lane = held[1], entry = held[2] })
return 'DONE'
