-- Move one delayed job into its lane, if it is due, its id is free and no cap of the queue stands against it. The id is the
-- member's, whatever the hash says; a lane that does not exist stays a field of the entry, and so do some of too many
-- fields: the worker refuses both.
-- KEYS delayed delayed-job job result high normal low dead meta open
-- ARGV id dead-maxlen fault ('' or the code of what is wrong with the id)
-- -> MOVED | EARLY | GONE (another was first) | DUP (finished, or another live entry has the id) | DEAD | FULL (the queue
--    has max_depth jobs) | CAPPED (its tenant has max_per_tenant; it is due again in a while) | AGAIN key …
local delayed, delayed_job, job = KEYS[1], KEYS[2], KEYS[3]
local lanes, id = { high = KEYS[5], normal = KEYS[6], low = KEYS[7] }, ARGV[1]

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
if ARGV[3] ~= '' or #stored == 0 then
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[2], '*', 'id', id, 'lane', name, 'entry', '', 'code',
    ARGV[3] ~= '' and ARGV[3] or 'invalid_request', 'reason', 'a delayed job without usable id or fields', 'attempts', '0', 'body', '',
    'truncated', '0')
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DEAD'
end
local gone, keys = gone_before(job), count_keys(own.tenant, own.group)
local again = undeclared(keys.all) or (gone and undeclared(gone.keys.all))
if again then return again end
if redis.call('EXISTS', KEYS[4]) == 1 or other_live(job, '', '', lanes) then
  if own.tenant ~= '' then redis.call('ZREM', keys.booked, 'delayed ' .. id) end
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DUP'
end

local caps = redis.call('HMGET', KEYS[9], 'max_depth', 'max_per_tenant')
local most, most_of_tenant = whole(caps[1]), whole(caps[2])
if most and redis.call('XLEN', KEYS[5]) + redis.call('XLEN', KEYS[6]) + redis.call('XLEN', KEYS[7]) >= most then return 'FULL' end
if most_of_tenant and own.tenant ~= '' then
  keep_only(keys.booked, 'zset')
  if used_by(keys.booked) >= most_of_tenant then prune(keys.booked, lanes, delayed) end
  if used_by(keys.booked) >= most_of_tenant then
    -- Later where many wait, so that looking at them again and again costs little.
    redis.call('ZADD', delayed, text(now_ms() + math.min(30000, math.max(1000, 10 * redis.call('ZCARD', keys.booked)))), id)
    return 'CAPPED'
  end
end
local entry = redis.call('XADD', lanes[name], '*', 'id', id, unpack(fields))
book({ job = job, quota = keys.quota, booked = keys.booked, group = keys.group, group_out = keys.group_out, open = KEYS[10],
  id = id, lane = name, entry = entry, tenant = own.tenant, group_name = own.group, callback = own.callback,
  stream = own.stream, nonce = '' }, gone)
redis.call('ZREM', delayed, id)
redis.call('DEL', delayed_job)
return 'MOVED'
