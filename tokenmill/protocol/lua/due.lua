-- Move one delayed job into its lane if it is due, its id is free and no cap of `meta` prevents it. The member of
-- `delayed` gives the id, whatever the hash says. An unknown lane, and the first fields of too many, stay in the entry: the worker
-- then refuses the entry, and the sender gets an error result.
-- KEYS delayed delayed_job job result high normal low dead meta open
-- ARGV request {dead_maxlen, fault}, id (any bytes). `fault` is the error code of an unusable id.
-- -> MOVED | EARLY | GONE (moved by another call) | DUP (the id has a result or another live entry) | DEAD | FULL (the queue
--    has max_depth jobs) | CAPPED (the tenant has max_per_tenant jobs; this job's due time is put off) | AGAIN key …
local delayed, delayed_job, job, result = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local high, normal, low, dead, meta, index = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local lanes = { high = high, normal = normal, low = low }
local request, id = cjson.decode(ARGV[1]), ARGV[2]

local score = redis.call('ZSCORE', delayed, id)
if not score then return 'GONE' end
if tonumber(score) > now_ms() then return 'EARLY' end
local stored = redis.pcall('HGETALL', delayed_job)
if stored.err then stored = {} end
local fields, name, own = {}, 'normal', { tenant = '', group = '', callback = '', stream = '1' }
for i = 1, math.min(#stored, 100), 2 do
  local field, value = stored[i], stored[i + 1]
  if field == 'lane' and lanes[value] then
    name = value
  elseif field ~= 'id' then
    if own[field] and (usable(value) or field == 'callback') then own[field] = value end
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
end
if request.fault or #stored == 0 then
  redis.call('XADD', dead, 'MAXLEN', '~', request.dead_maxlen, '*', 'id', id, 'lane', name, 'entry', '', 'code',
    request.fault or 'invalid_request', 'reason', 'a delayed job without usable id or fields', 'attempts', '0', 'body', '',
    'truncated', '0')
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DEAD'
end
local predecessor, keys = deleted_predecessor(job), count_keys(own.tenant, own.group)
local again = undeclared(keys.all) or (predecessor and undeclared(predecessor.keys.all))
if again then return again end
if redis.call('EXISTS', result) == 1 or other_live(job, '', '', lanes) then
  if own.tenant ~= '' then redis.call('ZREM', keys.booked, 'delayed ' .. id) end
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DUP'
end

local caps = redis.call('HMGET', meta, 'max_depth', 'max_per_tenant')
local max_depth, max_per_tenant = whole(caps[1]), whole(caps[2])
if max_depth and redis.call('XLEN', high) + redis.call('XLEN', normal) + redis.call('XLEN', low) >= max_depth then
  return 'FULL'
end
if max_per_tenant and own.tenant ~= '' then
  keep_only(keys.booked, 'zset')
  if used_by(keys.booked) >= max_per_tenant then prune(keys.booked, lanes, delayed) end
  if used_by(keys.booked) >= max_per_tenant then
    -- The delay of the next try grows with the number of the tenant's jobs, so that repeated tries cost little.
    local pause = math.min(30000, math.max(1000, 10 * redis.call('ZCARD', keys.booked)))
    redis.call('ZADD', delayed, text(now_ms() + pause), id)
    return 'CAPPED'
  end
end
local entry = redis.call('XADD', lanes[name], '*', 'id', id, unpack(fields))
count_queued({ job = job, quota = keys.quota, booked = keys.booked, group = keys.group, group_out = keys.group_out,
  open = index, id = id, lane = name, entry = entry, tenant = own.tenant, group_name = own.group, callback = own.callback,
  stream = own.stream, nonce = '' }, predecessor)
redis.call('ZREM', delayed, id)
redis.call('DEL', delayed_job)
return 'MOVED'
