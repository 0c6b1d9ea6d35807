-- Add a job to its lane, or with a delay to the delayed jobs, unless its id is taken or a cap is reached.
-- KEYS high normal low job result meta quota group group_out delayed_job delayed booked open
-- ARGV request {lane, id, tenant, group, nonce, delay_ms, fields}, body (any bytes). `fields` is the list of names and values
--      of the entry's other fields, `tenant` and `group` included; `delay_ms` is absent for a job without delay.
-- -> OK entry | OK '' (delayed) | EXISTS state | FULL depth | QUOTA used | AGAIN key …
local high, normal, low, job, result, meta = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local quota, group, group_out, delayed_job, delayed = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11]
local booked, index, lanes = KEYS[12], KEYS[13], { high = high, normal = normal, low = low }
local request, body = cjson.decode(ARGV[1]), ARGV[2]
local tenant, delay, fields = request.tenant or '', request.delay_ms, request.fields

local held = redis.call('HMGET', job, 'nonce', 'lane', 'entry', 'state')
local known = held[3] and lanes[held[2]]
local taken = redis.call('EXISTS', result) == 1 or (known and live(known, held[3]) ~= nil)
local is_delayed = redis.call('EXISTS', delayed_job) == 1
if taken or is_delayed then
  -- The same nonce: the caller repeats a call whose reply was lost.
  if held[1] == request.nonce then return { 'OK', taken and held[3] or '' } end
  return { 'EXISTS', taken and (held[4] or 'finished') or 'delayed' }
end
local predecessor = deleted_predecessor(job)
local again = predecessor and undeclared(predecessor.keys.all)
if again then return again end

local caps = redis.call('HMGET', meta, 'max_depth', 'max_per_tenant')
local max_depth, max_per_tenant = whole(caps[1]), whole(caps[2])
local depth = redis.call('XLEN', high) + redis.call('XLEN', normal) + redis.call('XLEN', low)
-- Delayed jobs count only against a job with a delay, so that they keep out no job without one.
if delay then depth = depth + redis.call('ZCARD', delayed) end
if max_depth and depth >= max_depth then return { 'FULL', depth } end
if max_per_tenant and tenant ~= '' then
  keep_only(booked, 'zset')
  local function used()
    return delay and redis.call('ZCARD', booked) or used_by(booked)
  end
  if used() >= max_per_tenant then
    prune(booked, lanes, delayed)
    if used() >= max_per_tenant then return { 'QUOTA', used() } end
  end
end

local callback, stream = '', '1'
for i = 1, #fields, 2 do
  if fields[i] == 'callback' then callback = fields[i + 1] end
  if fields[i] == 'stream' then stream = fields[i + 1] end
end
if delay then
  if tenant ~= '' then redis.call('ZADD', booked, text(-now_us()), 'delayed ' .. request.id) end
  redis.call('HSET', delayed_job, 'lane', request.lane, 'id', request.id, 'body', body, unpack(fields))
  redis.call('ZADD', delayed, text(now_ms() + delay), request.id)
  redis.call('HSET', job, 'state', 'delayed', 'nonce', request.nonce)
  redis.call('EXPIRE', job, text(math.ceil(delay / 1000) + 86400))
  return { 'OK', '' }
end
local entry = redis.call('XADD', lanes[request.lane], '*', 'id', request.id, 'body', body, unpack(fields))
count_queued({ job = job, quota = quota, booked = booked, group = group, group_out = group_out, open = index,
  id = request.id, lane = request.lane, entry = entry, tenant = tenant, group_name = request.group or '',
  callback = callback, stream = stream, nonce = request.nonce }, predecessor)
return { 'OK', entry }
