-- Add a job, or with a delay put it aside until it is due, unless its id is taken or a cap is reached.
-- KEYS high normal low job result meta quota group group-out delayed-job delayed booked open
-- ARGV lane-name tenant group nonce delay-ms ('' = none) field value …
-- -> OK entry | OK '' (put aside) | EXISTS state | FULL depth | QUOTA used | AGAIN key …
local lanes = { high = KEYS[1], normal = KEYS[2], low = KEYS[3] }
local name, tenant, group, nonce, delay = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local job, result, meta, quota = KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local delayed_job, delayed, booked = KEYS[10], KEYS[11], KEYS[12]

local held = redis.call('HMGET', job, 'nonce', 'lane', 'entry', 'state')
local known = held[3] and lanes[held[2]]
local taken = redis.call('EXISTS', result) == 1 or (known and live(known, held[3]) ~= nil)
local put_aside = redis.call('EXISTS', delayed_job) == 1
if taken or put_aside then
  -- The same nonce: our own call, whose first reply was lost.
  if held[1] == nonce then return { 'OK', taken and held[3] or '' } end
  return { 'EXISTS', taken and (held[4] or 'finished') or 'delayed' }
end
local gone = gone_before(job)
local again = gone and undeclared(gone.keys.all)
if again then return again end

local caps = redis.call('HMGET', meta, 'max_depth', 'max_per_tenant')
local most, most_of_tenant, depth = whole(caps[1]), whole(caps[2]), 0
for i = 1, 3 do depth = depth + redis.call('XLEN', KEYS[i]) end
-- What is put aside counts only against what is to be put aside: a job of tomorrow keeps none of today out.
if delay ~= '' then depth = depth + redis.call('ZCARD', delayed) end
if most and depth >= most then return { 'FULL', depth } end
if most_of_tenant and tenant ~= '' then
  keep_only(booked, 'zset')
  local function used()
    return delay == '' and used_by(booked) or redis.call('ZCARD', booked)
  end
  if used() >= most_of_tenant then
    prune(booked, lanes, delayed)
    if used() >= most_of_tenant then return { 'QUOTA', used() } end
  end
end

local fields, callback, stream = {}, '', '1'
for i = 6, #ARGV do fields[#fields + 1] = ARGV[i] end
for i = 1, #fields, 2 do
  if fields[i] == 'callback' then callback = fields[i + 1] end
  if fields[i] == 'stream' then stream = fields[i + 1] end
end
if delay ~= '' then
  if tenant ~= '' then redis.call('ZADD', booked, text(-now_us()), 'delayed ' .. ARGV[7]) end
  redis.call('HSET', delayed_job, 'lane', name, unpack(fields))
  redis.call('ZADD', delayed, text(now_ms() + tonumber(delay)), ARGV[7])
  redis.call('HSET', job, 'state', 'delayed', 'nonce', nonce)
  redis.call('EXPIRE', job, text(math.ceil(tonumber(delay) / 1000) + 86400))
  return { 'OK', '' }
end
local entry = redis.call('XADD', lanes[name], '*', unpack(fields))
book({ job = job, quota = quota, booked = booked, group = KEYS[8], group_out = KEYS[9], open = KEYS[13], id = ARGV[7],
  lane = name, entry = entry, tenant = tenant, group_name = group, callback = callback, stream = stream, nonce = nonce }, gone)
return { 'OK', entry }
