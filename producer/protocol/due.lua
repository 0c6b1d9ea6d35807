-- Move one delayed job into its lane, if it is due and its id is free. The id is the member's, whatever the hash says; a
-- lane that does not exist stays a field of the entry, and so do some of too many fields: the worker refuses both.
-- KEYS delayed delayed-job job result high normal low dead
-- ARGV root id dead-maxlen fault ('' or the code of what is wrong with the id)
-- -> MOVED | EARLY | GONE (another worker was first) | DUP (finished, or another live entry has the id) | DEAD
local delayed, delayed_job, job = KEYS[1], KEYS[2], KEYS[3]
local lanes = { high = KEYS[5], normal = KEYS[6], low = KEYS[7] }
local root, id = ARGV[1], ARGV[2]

local function usable(name)
  return #name <= 128 and string.match(name, '^[%w_.-]+$') ~= nil
end

local score = redis.call('ZSCORE', delayed, id)
if not score then return 'GONE' end
if tonumber(score) > now_ms() then return 'EARLY' end
local stored = redis.pcall('HGETALL', delayed_job)
if stored.err then stored = {} end
local fields, name, tenant, group = {}, 'normal', '', ''
for i = 1, math.min(#stored, 100), 2 do
  local field, value = stored[i], stored[i + 1]
  if field == 'lane' and lanes[value] then
    name = value
  elseif field ~= 'id' then
    if field == 'tenant' and usable(value) then tenant = value end
    if field == 'group' and usable(value) then group = value end
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
end
if ARGV[4] ~= '' or #stored == 0 then
  redis.call('XADD', KEYS[8], 'MAXLEN', '~', ARGV[3], '*', 'id', id, 'lane', name, 'entry', '', 'code',
    ARGV[4] ~= '' and ARGV[4] or 'invalid_request', 'reason', 'a delayed job without usable id or fields', 'attempts', '0', 'body', '',
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
local entry = redis.call('XADD', lanes[name], '*', 'id', id, unpack(fields))
book({ job = job, quota = root .. 'quota:' .. tenant, group = root .. 'group:' .. group,
  group_out = root .. 'group-out:' .. group, lane = name, entry = entry, tenant = tenant, group_name = group, nonce = '' })
redis.call('ZREM', delayed, id)
redis.call('DEL', delayed_job)
return 'MOVED'
