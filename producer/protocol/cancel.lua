#!lua flags=allow-oom
-- Cancel a job: queued and delayed ones end here and now, running ones are asked to.
-- KEYS job result cancel out delayed delayed-job callbacks high normal low
-- ARGV root id reason cancel-ttl json result-ttl stream-ttl consumer-group
-- -> LATE (it has ended) | DONE | ASKED
-- Quota and group keys are named by the job's own fields, hence the root; they share the queue's hash tag.
local job, result, cancel, out, delayed, delayed_job = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local lanes = { high = KEYS[8], normal = KEYS[9], low = KEYS[10] }
local root, id = ARGV[1], ARGV[2]

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return ''
end

-- The caller's JSON with what only the job knows. Both values are safe inside JSON, by their patterns.
local function completed(fields)
  local attempt, trace = redis.call('HGET', job, 'attempt') or '0', field(fields, 'traceparent')
  local json = string.gsub(ARGV[5], '"attempt":null', '"attempt":' .. attempt, 1)
  if not string.match(trace, '^[%x-]+$') then return json end
  return string.sub(json, 1, -2) .. ',"traceparent":"' .. trace .. '"}'
end

local function finish_here(fields, lane, entry)
  local group, tenant = field(fields, 'group'), field(fields, 'tenant')
  open({ job = job, out = out, worker = '', prompt_tokens = '0', group_name = group, tenant = tenant })
  finish({ job = job, result = result, cancel = cancel, out = out, quota = root .. 'quota:' .. tenant,
    group = root .. 'group:' .. group, group_out = root .. 'group-out:' .. group, callbacks = KEYS[7], id = id,
    status = 'cancelled', json = completed(fields), stream = field(fields, 'stream'), result_ttl = ARGV[6], stream_ttl = ARGV[7],
    group_name = group, callback = field(fields, 'callback'), lane = lane, entry = entry })
end

if redis.call('EXISTS', result) == 1 then return 'LATE' end
local held = redis.call('HMGET', job, 'state', 'lane', 'entry')
local lane = held[2] and lanes[held[2]]
local found = lane and held[3] and live(lane, held[3])
if found then
  if held[1] == 'queued' then
    finish_here(found[2], held[2], held[3])
    remove(lane, ARGV[8], held[3])
    return 'DONE'
  end
elseif redis.call('EXISTS', delayed_job) == 1 then
  local fields = redis.call('HGETALL', delayed_job)
  reset(job)
  finish_here(fields, field(fields, 'lane'), '')
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DONE'
end
redis.call('SET', cancel, ARGV[3], 'EX', ARGV[4])
return 'ASKED'
