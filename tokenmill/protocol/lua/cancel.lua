#!lua flags=allow-oom
-- Cancel a job: end it if it is queued or delayed, else set its cancel key, which the worker that runs it polls.
-- KEYS job result cancel out delayed delayed_job callbacks high normal low meta open
-- ARGV request {consumer_group, id, reason, cancel_ttl_s, result_ttl_s, stream_ttl_s}, result (JSON)
-- -> LATE (the job had ended) | DONE | ASKED | AGAIN key …
local job, result, cancel, out, delayed, delayed_job = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local callbacks, lanes = KEYS[7], { high = KEYS[8], normal = KEYS[9], low = KEYS[10] }
local meta, index = KEYS[11], KEYS[12]
local request, result_json = cjson.decode(ARGV[1]), ARGV[2]
local id = request.id

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return ''
end

local function name_in(fields, name)
  local value = field(fields, name)
  return usable(value) and value or ''
end

-- End the job, described by its entry's fields. Returns nil, or the reply `AGAIN key …`; then nothing was written.
local function finish_here(fields, lane, entry)
  local group, tenant = name_in(fields, 'group'), name_in(fields, 'tenant')
  local keys = count_keys(tenant, group)
  local again = undeclared(keys.all)
  if again then return again end
  if entry == '' then
    reset(job)
    if tenant ~= '' then redis.call('ZREM', keys.booked, 'delayed ' .. id) end
  end
  open_stream({ job = job, out = out, worker = '', prompt_tokens = '0', group_name = group, tenant = tenant })
  local result_ttl, stream_ttl = lives(meta, request)
  write_ending({ job = job, result = result, cancel = cancel, out = out, quota = keys.quota, booked = keys.booked,
    running = keys.running, group = keys.group, group_out = keys.group_out, callbacks = callbacks, open = index, id = id,
    status = 'cancelled', json = completed(result_json, job, field(fields, 'traceparent')),
    stream = field(fields, 'stream'), result_ttl = result_ttl, stream_ttl = stream_ttl, tenant = tenant,
    group_name = group, callback = field(fields, 'callback'), lane = lane, entry = entry })
end

if redis.call('EXISTS', result) == 1 then return 'LATE' end
local held = redis.call('HMGET', job, 'state', 'lane', 'entry')
local lane = held[2] and lanes[held[2]]
local found = lane and held[3] and live(lane, held[3])
if found then
  if held[1] == 'queued' then
    local again = finish_here(found[2], held[2], held[3])
    if again then return again end
    remove(lane, request.consumer_group, held[3])
    return 'DONE'
  end
elseif redis.call('EXISTS', delayed_job) == 1 then
  local fields = redis.call('HGETALL', delayed_job)
  local again = finish_here(fields, field(fields, 'lane'), '')
  if again then return again end
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DONE'
end
redis.call('SET', cancel, request.reason, 'EX', request.cancel_ttl_s)
return 'ASKED'
