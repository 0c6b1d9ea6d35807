#!lua flags=allow-oom
-- Cancel a job: queued and delayed ones end here and now, running ones are asked to.
-- KEYS job result cancel out delayed delayed-job callbacks high normal low meta open
-- ARGV id reason cancel-ttl json result-ttl stream-ttl consumer-group
-- -> LATE (it has ended) | DONE | ASKED | AGAIN key …
local job, result, cancel, out, delayed, delayed_job = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local lanes, id = { high = KEYS[8], normal = KEYS[9], low = KEYS[10] }, ARGV[1]

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

-- End the job with what its fields say. Nil, or the keys that are not declared; then nothing was written.
local function finish_here(fields, lane, entry)
  local group, tenant = name_in(fields, 'group'), name_in(fields, 'tenant')
  local keys = count_keys(tenant, group)
  local again = undeclared(keys.all)
  if again then return again end
  if entry == '' then
    reset(job)
    if tenant ~= '' then redis.call('ZREM', keys.booked, 'delayed ' .. id) end
  end
  open({ job = job, out = out, worker = '', prompt_tokens = '0', group_name = group, tenant = tenant })
  local result_ttl, stream_ttl = lives(KEYS[11], ARGV[5], ARGV[6])
  finish({ job = job, result = result, cancel = cancel, out = out, quota = keys.quota, booked = keys.booked,
    running = keys.running, group = keys.group, group_out = keys.group_out, callbacks = KEYS[7], open = KEYS[12], id = id,
    status = 'cancelled', json = completed(ARGV[4], job, field(fields, 'traceparent')), stream = field(fields, 'stream'),
    result_ttl = result_ttl, stream_ttl = stream_ttl, tenant = tenant, group_name = group,
    callback = field(fields, 'callback'), lane = lane, entry = entry })
end

if redis.call('EXISTS', result) == 1 then return 'LATE' end
local held = redis.call('HMGET', job, 'state', 'lane', 'entry')
local lane = held[2] and lanes[held[2]]
local found = lane and held[3] and live(lane, held[3])
if found then
  if held[1] == 'queued' then
    local again = finish_here(found[2], held[2], held[3])
    if again then return again end
    remove(lane, ARGV[7], held[3])
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
redis.call('SET', cancel, ARGV[2], 'EX', ARGV[3])
return 'ASKED'
