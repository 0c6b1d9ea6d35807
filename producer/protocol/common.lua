-- What several scripts share; put in front of each of them.

-- The entry, or nil where it was deleted.
local function live(lane, entry)
  return redis.call('XRANGE', lane, entry, entry)[1]
end

-- True where `consumer` holds the entry and it still exists; its lease then starts anew.
local function owned(lane, group, entry, consumer)
  local found = redis.pcall('XPENDING', lane, group, entry, entry, 1, consumer)
  if found.err then
    if string.find(tostring(found.err), 'NOGROUP', 1, true) then return false end
    error(tostring(found.err))
  end
  -- Pending entries that were deleted are still listed; a claim tells, and costs no copy of the body.
  return #found == 1 and #redis.call('XCLAIM', lane, group, consumer, 0, entry, 'IDLE', 0, 'JUSTID') == 1
end

-- True where job:<id> names another entry that is still live. `lanes` maps a lane's name to its key.
local function other_live(job, lane_name, entry, lanes)
  local held = redis.call('HMGET', job, 'lane', 'entry')
  local lane = held[1] and lanes[held[1]]
  if not lane or not held[2] or (held[1] == lane_name and held[2] == entry) then return false end
  return live(lane, held[2]) ~= nil
end

local function remove(lane, group, entry)
  -- The entry may never have been read, and the group need not exist.
  redis.pcall('XACK', lane, group, entry)
  redis.call('XDEL', lane, entry)
end

-- Both parts of the stream's last ID; 0, 0 where there is no stream. It survives trimming.
local function last_id(out)
  if redis.call('EXISTS', out) == 0 then return 0, 0 end
  local info = redis.call('XINFO', 'STREAM', out)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      local first, second = string.match(info[i + 1], '^(%d+)-(%d+)$')
      return tonumber(first), tonumber(second)
    end
  end
  error('XINFO STREAM without last-generated-id')
end

local function keep_only(key, kind)
  local is = redis.call('TYPE', key)
  if type(is) == 'table' then is = is.ok end
  if is ~= 'none' and is ~= kind then redis.call('DEL', key) end
end

-- What lies under a job's own names but no worker has written would end every worker that takes the job: it goes. A
-- stream whose last ID is past all times and fences takes no further entry.
local function clear_foreign(job, out)
  keep_only(job, 'hash')
  keep_only(out, 'stream')
  if last_id(out) > 2 ^ 52 then redis.call('DEL', out) end
end

local function text(number)
  return string.format('%.0f', number)
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Whoever reads next after `delay` ms finds this entry, which is to be idle for a lease by then.
local function list_returned(returned, lane_name, entry, delay)
  redis.call('ZADD', returned, text(now_ms() + delay), lane_name .. ' ' .. entry)
end

local function next_fence(job, out)
  return text(1 + math.max(tonumber(redis.call('HGET', job, 'fence') or '0'), (last_id(out))))
end

-- Books that others may write too (group, quota, callbacks) can be of a wrong type or hold no number. Lua does not roll
-- back, so that must not stop a script half-way: what cannot be booked is left out.
local function number_at(key)
  local value = redis.pcall('GET', key)
  return type(value) == 'string' and tonumber(value) or 0
end

-- A new life for the id: nothing of an earlier entry is kept but the fence.
local function reset(job)
  redis.call('HDEL', job, 'worker', 'attempt', 'deaths', 'group', 'tenant', 'counted', 'nonce', 'start', 'tries', 'alone', 'cleared')
  redis.call('PERSIST', job)
end

-- Book a queued entry: job hash, group total, tenant quota. `f`: job, quota, group, group_out (keys), lane, entry, tenant,
-- group_name, nonce.
local function book(f)
  reset(f.job)
  redis.call('HSET', f.job, 'state', 'queued', 'lane', f.lane, 'entry', f.entry, 'counted', '1', 'nonce', f.nonce)
  if f.tenant ~= '' then
    redis.call('HSET', f.job, 'tenant', f.tenant)
    redis.pcall('INCR', f.quota)
    redis.call('PERSIST', f.quota)
  end
  if f.group_name ~= '' then
    redis.call('HSET', f.job, 'group', f.group_name)
    redis.pcall('HINCRBY', f.group, 'total', 1)
    redis.call('PERSIST', f.group)
    redis.call('PERSIST', f.group_out)
  end
end

-- All writes of an ending but the entry's removal; every check is behind us. `f`: job, result, cancel, out, quota, group,
-- group_out, callbacks, running (keys), id, status, json, stream, result_ttl, stream_ttl, group_name, callback, lane, entry.
local function finish(f)
  redis.call('SET', f.result, f.json, 'NX', 'EX', f.result_ttl)
  if f.stream == '0' then
    redis.call('XADD', f.out, '*', 'type', 'final', 'status', f.status)
  else
    redis.call('XADD', f.out, '*', 'type', 'final', 'status', f.status, 'result', f.json)
  end
  redis.call('EXPIRE', f.out, f.stream_ttl)

  local booked = redis.call('HMGET', f.job, 'counted', 'tenant')
  if booked[1] and booked[2] then
    if number_at(f.quota) > 0 then redis.pcall('DECR', f.quota) end
    -- Tenants can be any number, and may never come back.
    if number_at(f.quota) <= 0 then redis.call('EXPIRE', f.quota, f.result_ttl) end
  end
  if f.running then redis.call('SREM', f.running, f.lane .. ' ' .. f.entry) end
  redis.call('HDEL', f.job, 'counted')
  redis.call('HSET', f.job, 'state', f.status, 'lane', f.lane, 'entry', f.entry)
  redis.call('EXPIRE', f.job, f.result_ttl)

  if f.group_name ~= '' then
    -- An entry added without the enqueue script was not in the total yet.
    if not booked[1] then redis.pcall('HINCRBY', f.group, 'total', 1) end
    redis.pcall('HINCRBY', f.group, f.status, 1)
    redis.pcall('XADD', f.group_out, '*', 'id', f.id, 'status', f.status)
    redis.call('EXPIRE', f.group, f.result_ttl)
    redis.call('EXPIRE', f.group_out, f.result_ttl)
  end
  if f.callback ~= '' then redis.pcall('XADD', f.callbacks, '*', 'id', f.id, 'url', f.callback) end
  redis.call('DEL', f.cancel)
end

-- Open the stream of an ending whose writer holds no text, and fill in what START would have put into the job's hash. `f`:
-- job, out (keys), worker, prompt_tokens, group_name, tenant.
local function open(f)
  local fence, known = next_fence(f.job, f.out), redis.call('HMGET', f.job, 'attempt', 'deaths')
  redis.call('XADD', f.out, fence .. '-0', 'type', 'start', 'worker', f.worker, 'attempt', known[1] or '0',
    'prompt_tokens', f.prompt_tokens)
  redis.call('HSET', f.job, 'worker', f.worker, 'fence', fence, 'attempt', known[1] or '0', 'deaths', known[2] or '0')
  if f.group_name ~= '' then redis.call('HSET', f.job, 'group', f.group_name) end
  if f.tenant ~= '' then redis.call('HSET', f.job, 'tenant', f.tenant) end
end
