#!lua flags=allow-oom
-- Check that a job without a result still has its entry. If the entry was deleted, end the job as cancelled, so that its
-- readers get a result and it is no longer counted.
-- KEYS open job result cancel out delayed_job callbacks meta high normal low
-- ARGV request {grace_ms, result_ttl_s, stream_ttl_s}, id (any bytes), result (JSON)
-- -> LIVE | KNOWN (it has ended, or is delayed) | MISSING (for less than `grace_ms`, or an entry that is not read yet may be a
--    second entry of this id) | DONE | AGAIN key …
local index, job, result, cancel, out, delayed_job = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local callbacks, meta, high, normal, low = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local lanes = { high = high, normal = normal, low = low }
local request, id, result_json = cjson.decode(ARGV[1]), ARGV[2], ARGV[3]

local score = tonumber(redis.call('ZSCORE', index, id) or '')
local held = redis.call('HMGET', job, 'lane', 'entry', 'tenant', 'group', 'callback', 'stream')
local known = redis.call('EXISTS', result) == 1 or redis.call('EXISTS', delayed_job) == 1
if not score or not held[2] or held[2] == '' or known then
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
if now_ms() + score < request.grace_ms then return 'MISSING' end
-- An operator may have moved the job: added it again with a bare XADD, then deleted the first entry. While the lanes hold more
-- entries than there are jobs known to have an entry, one of these entries may be this job's.
local entries = redis.call('XLEN', high) + redis.call('XLEN', normal) + redis.call('XLEN', low)
if entries > redis.call('ZCOUNT', index, 0, '+inf') then return 'MISSING' end

local tenant, group = held[3] or '', held[4] or ''
local keys = count_keys(tenant, group)
local again = undeclared(keys.all)
if again then return again end
local result_ttl, stream_ttl = lives(meta, request)
clear_foreign(job, out)
open_stream({ job = job, out = out, worker = '', prompt_tokens = '0', group_name = group, tenant = tenant })
write_ending({ job = job, result = result, cancel = cancel, out = out, quota = keys.quota, booked = keys.booked,
  running = keys.running, group = keys.group, group_out = keys.group_out, callbacks = callbacks, open = index, id = id,
  status = 'cancelled', json = completed(result_json, job), stream = held[6] or '1', result_ttl = result_ttl,
  stream_ttl = stream_ttl, tenant = tenant, group_name = group, callback = held[5] or '', lane = held[1], entry = held[2] })
return 'DONE'
