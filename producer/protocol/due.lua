-- Move one delayed job into its lane, if it is due and its id is free.
-- KEYS delayed delayed-job job result high normal low dead
-- ARGV root id dead-maxlen fault ('' or the code of what is wrong with the id)
-- -> MOVED | EARLY | GONE (another worker was first) | DUP (finished, or another live entry has the id) | DEAD
local delayed, delayed_job, job = KEYS[1], KEYS[2], KEYS[3]
local lanes = { high = KEYS[5], normal = KEYS[6], low = KEYS[7] }
local root, id = ARGV[1], ARGV[2]

local score = redis.call('ZSCORE', delayed, id)
if not score then return 'GONE' end
if tonumber(score) > now_ms() then return 'EARLY' end
local stored = redis.call('HGETALL', delayed_job)
local fields, name, tenant, group = {}, 'normal', '', ''
for i = 1, #stored, 2 do
  if stored[i] == 'lane' then
    name = stored[i + 1]
  else
    if stored[i] == 'tenant' then tenant = stored[i + 1] end
    if stored[i] == 'group' then group = stored[i + 1] end
    fields[#fields + 1] = stored[i]
    fields[#fields + 1] = stored[i + 1]
  end
end
if ARGV[4] ~= '' or #fields == 0 or #fields > 100 or not lanes[name] then
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[3], '*', 'id', id, 'lane', name, 'entry', '', 'code',
    ARGV[4] ~= '' and ARGV[4] or 'invalid_request', 'reason', 'a delayed job without usable id, fields or lane', 'attempts', '0', 'body', '',
    'truncated', '0')
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DEAD'
end
if redis.call('EXISTS', KEYS[4]) == 1 or other_live(job, '', '', lanes) then
  redis.call('ZREM', delayed, id)
  redis.call('DEL', delayed_job)
  return 'DUP'
end
local entry = redis.call('XADD', lanes[name], '*', unpack(fields))
book({ job = job, quota = root .. 'quota:' .. tenant, group = root .. 'group:' .. group,
  group_out = root .. 'group-out:' .. group, lane = name, entry = entry, tenant = tenant, group_name = group, nonce = '' })
redis.call('ZREM', delayed, id)
redis.call('DEL', delayed_job)
return 'MOVED'
