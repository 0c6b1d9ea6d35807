-- Functions that several scripts share. This file is put in front of each script.
--
-- `request` is the script's one JSON argument. Requests about an entry that a worker holds have the fields `consumer_group`,
-- `consumer` (the worker), `lane` (its name) and `entry`. A field that does not apply is absent (nil).

-- Return the entry as {id, fields}, or nil if it was deleted.
local function live(lane, entry)
  return redis.call('XRANGE', lane, entry, entry)[1]
end

-- Return true if the requesting consumer holds the entry and the entry exists; its lease then starts again. An entry that
-- is listed in `returned` was handed back: it has no owner until a READ takes it, and its idle time stays as it is.
local function owned(lane, returned, request)
  local group, consumer, entry = request.consumer_group, request.consumer, request.entry
  if redis.call('ZSCORE', returned, request.lane .. ' ' .. entry) then return false end
  local found = redis.pcall('XPENDING', lane, group, entry, entry, 1, consumer)
  if found.err then
    if string.find(tostring(found.err), 'NOGROUP', 1, true) then return false end
    error(tostring(found.err))
  end
  -- XPENDING also lists entries that were deleted; XCLAIM does not return those. JUSTID avoids a copy of the body.
  return #found == 1 and #redis.call('XCLAIM', lane, group, consumer, 0, entry, 'IDLE', 0, 'JUSTID') == 1
end

-- Return true if job:<id> names another entry that still exists. `lanes` maps a lane's name to its key.
local function other_live(job, lane_name, entry, lanes)
  local held = redis.call('HMGET', job, 'lane', 'entry')
  local lane = held[1] and lanes[held[1]]
  if not lane or not held[2] or (held[1] == lane_name and held[2] == entry) then return false end
  return live(lane, held[2]) ~= nil
end

-- Acknowledge and delete an entry. It may never have been read, and the consumer group need not exist.
local function remove(lane, group, entry)
  redis.pcall('XACK', lane, group, entry)
  redis.call('XDEL', lane, entry)
end

-- Return both parts of the stream's last ID, which survives trimming; 0, 0 if there is no stream.
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

-- Delete a key that is not of the type `kind`.
local function keep_only(key, kind)
  local is = redis.call('TYPE', key)
  if type(is) == 'table' then is = is.ok end
  if is ~= 'none' and is ~= kind then redis.call('DEL', key) end
end

-- Delete values under a job's keys that no worker has written: they would make every worker fail that takes the job. A
-- stream whose last ID is above all times and fences accepts no further entry.
local function clear_foreign(job, out)
  keep_only(job, 'hash')
  keep_only(out, 'stream')
  if last_id(out) > 2 ^ 52 then redis.call('DEL', out) end
end

-- Write a whole number without exponent; Lua's own conversion keeps 14 digits only.
local function text(number)
  return string.format('%.0f', number)
end

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

-- After `delay` ms the next READ of any worker takes this entry, which must be idle for a lease by then.
local function list_returned(returned, lane_name, entry, delay)
  redis.call('ZADD', returned, text(now_ms() + delay), lane_name .. ' ' .. entry)
end

local function next_fence(job, out)
  return text(1 + math.max(tonumber(redis.call('HGET', job, 'fence') or '0'), (last_id(out))))
end

-- Read a whole number of `meta`, of at most 15 digits as in meta.py; nil for any other value, which has no effect and is
-- named in the workers' logs. Redis would refuse an expiry of more digits, after the script's first write.
local function whole(value)
  local digits = value and string.match(value, '^%s*(%d+)%s*$')
  return digits and #digits <= 15 and tonumber(digits) or nil
end

-- Return the seconds that results and ended streams live: the values in `meta`, published by the worker that started last,
-- else the caller's own.
local function lives(meta, request)
  local published = redis.call('HMGET', meta, 'result_ttl_seconds', 'stream_ttl_seconds')
  local result = math.max(1, whole(published[1]) or request.result_ttl_s)
  return text(result), text(math.min(result, math.max(1, whole(published[2]) or request.stream_ttl_s)))
end

-- Return nil if all `names` are in KEYS, else the reply `AGAIN key …`. Every key that a script touches must be in KEYS. Where
-- a key's name depends on data, the script replies AGAIN before it writes data of the job, and the caller runs the script
-- again with these keys behind its own.
local function undeclared(names)
  local known, missing = {}, { 'AGAIN' }
  for _, key in ipairs(KEYS) do known[key] = true end
  for _, key in ipairs(names) do
    if not known[key] then missing[#missing + 1] = key end
  end
  return #missing > 1 and missing or nil
end

-- Return true if `name` may be an id, group or tenant.
local function usable(name)
  return name and #name <= 128 and string.match(name, '^[%w_.-]+$') ~= nil
end

-- Return the keys that count the jobs of this tenant and this group ('' = none), by field and as the list `all`.
local function count_keys(tenant, group)
  local root, found = string.match(KEYS[1], '^(.-{[^}]*}:)'), { all = {} }
  local function add(field, name)
    found[field] = name
    found.all[#found.all + 1] = name
  end
  if tenant ~= '' then
    add('quota', root .. 'quota:' .. tenant)
    add('booked', root .. 'booked:' .. tenant)
    add('running', root .. 'running:' .. tenant)
  end
  if group ~= '' then
    add('group', root .. 'group:' .. group)
    add('group_out', root .. 'group-out:' .. group)
  end
  return found
end

-- Add a job to the index `open`: ids of jobs that have no result yet, so that RECONCILE finds a job whose entry was deleted.
-- Score: ms of the last check that the entry exists; negative once a check found the entry missing.
local function open_job(index, id)
  redis.pcall('ZADD', index, text(now_ms()), id)
end

-- Count a tenant's jobs. A member of `booked` is `<lane> <entry>`, whose score is the time (in us) of the last check of that
-- entry, or `delayed <id>`, with a negative score, which is not counted here.
local function used_by(booked)
  return redis.call('ZCOUNT', booked, 0, '+inf')
end

local function write_quota(quota, booked, ttl)
  local used = used_by(booked)
  if used > 0 then
    redis.call('SET', quota, used)
  else
    redis.call('SET', quota, 0, 'EX', ttl) -- there can be any number of tenants, and a tenant may send no further job
  end
end

-- Take `member` out of a tenant's count. `f`: quota, booked (keys), counted.
local function uncount(f, member, ttl)
  keep_only(f.booked, 'zset')
  local removed = redis.call('ZREM', f.booked, member)
  if removed == 1 or f.counted then write_quota(f.quota, f.booked, ttl) end
end

-- Take members out of a tenant's count whose entry or delayed job was deleted: looks at up to 16 of each kind, those with
-- the oldest look first. Called where a cap would refuse a job.
local function prune(booked, lanes, delayed)
  local now = now_us()
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', booked, 0, '+inf', 'LIMIT', 0, 16)) do
    local lane, entry = string.match(member, '^(%a+) ([%d-]+)$')
    if lanes[lane] and live(lanes[lane], entry) then
      redis.call('ZADD', booked, text(now), member)
    else
      redis.call('ZREM', booked, member)
    end
  end
  for _, member in ipairs(redis.call('ZREVRANGEBYSCORE', booked, '(0', '-inf', 'LIMIT', 0, 16)) do
    if redis.call('ZSCORE', delayed, string.sub(member, 9)) then
      redis.call('ZADD', booked, text(-now), member)
    else
      redis.call('ZREM', booked, member)
    end
  end
end

-- The keys of groups and callbacks may also be written by producers: they can be of a wrong type or hold no number. Lua does
-- not roll back, so such an error must not stop a script after its first write: pcall, and the count is left out.

-- Begin a new life of the id: remove all that an earlier entry left in the job hash, except the fence.
local function reset(job)
  redis.call('HDEL', job, 'worker', 'attempt', 'deaths', 'group', 'tenant', 'counted', 'nonce', 'start', 'tries', 'alone',
    'cleared', 'excused', 'callback', 'stream')
  redis.call('PERSIST', job)
end

-- Read from the job hash an earlier entry of this id that was counted and has not ended. Called where that entry is known
-- to be deleted. Returns {member, group_name, keys}, or nil if there is none.
local function deleted_predecessor(job)
  local held = redis.call('HMGET', job, 'lane', 'entry', 'tenant', 'group', 'counted')
  if not held[5] or not held[1] or not held[2] then return nil end
  local keys = count_keys(held[3] or '', held[4] or '')
  return { member = held[1] .. ' ' .. held[2], group_name = held[4] or '', keys = keys }
end

-- Take a deleted predecessor out of the counts, since another entry of its id takes its place. Returns true if its group is
-- `group_name`: that group's total then stays, and counts the new entry.
local function uncount_predecessor(predecessor, group_name)
  if not predecessor then return false end
  local in_total = predecessor.group_name == group_name
  if predecessor.keys.group and not in_total then redis.pcall('HINCRBY', predecessor.keys.group, 'total', -1) end
  if predecessor.keys.booked then
    uncount(predecessor.keys, predecessor.member, 86400)
    redis.call('SREM', predecessor.keys.running, predecessor.member)
  end
  return in_total
end

-- Record a new queued entry: job hash, index `open`, tenant quota, group total. `f`: job, quota, booked, group, group_out, open
-- (keys), id, lane, entry, tenant, group_name, callback, stream, nonce. `predecessor`, from `deleted_predecessor`, is taken out
-- of the counts.
local function count_queued(f, predecessor)
  local in_total = uncount_predecessor(predecessor, f.group_name)
  reset(f.job)
  redis.call('HSET', f.job, 'state', 'queued', 'lane', f.lane, 'entry', f.entry, 'counted', '1', 'nonce', f.nonce)
  if f.callback ~= '' then redis.call('HSET', f.job, 'callback', f.callback) end
  if f.stream == '0' then redis.call('HSET', f.job, 'stream', '0') end
  open_job(f.open, f.id)
  if f.tenant ~= '' then
    redis.call('HSET', f.job, 'tenant', f.tenant)
    keep_only(f.booked, 'zset')
    redis.call('ZREM', f.booked, 'delayed ' .. f.id)
    redis.call('ZADD', f.booked, text(now_us()), f.lane .. ' ' .. f.entry)
    write_quota(f.quota, f.booked, 86400)
  end
  if f.group_name ~= '' then
    redis.call('HSET', f.job, 'group', f.group_name)
    if not in_total then redis.pcall('HINCRBY', f.group, 'total', 1) end
    redis.call('PERSIST', f.group)
    redis.call('PERSIST', f.group_out)
  end
end

-- Write a job's ending, all but the removal of its entry. All checks must be done before. `f`: job, result, cancel, out, quota,
-- booked, running, group, group_out, callbacks, open (keys), id, status, json, stream, result_ttl, stream_ttl, tenant,
-- group_name, callback, lane, entry.
local function write_ending(f)
  redis.call('SET', f.result, f.json, 'NX', 'EX', f.result_ttl)
  if f.stream == '0' then
    redis.call('XADD', f.out, '*', 'type', 'final', 'status', f.status)
  else
    redis.call('XADD', f.out, '*', 'type', 'final', 'status', f.status, 'result', f.json)
  end
  redis.call('EXPIRE', f.out, f.stream_ttl)

  local member, counted = f.lane .. ' ' .. f.entry, redis.call('HGET', f.job, 'counted')
  if f.tenant ~= '' then
    f.counted = counted
    uncount(f, member, f.result_ttl)
    redis.call('SREM', f.running, member)
  end
  redis.call('HDEL', f.job, 'counted')
  redis.call('HSET', f.job, 'state', f.status, 'lane', f.lane, 'entry', f.entry)
  redis.call('EXPIRE', f.job, f.result_ttl)
  redis.pcall('ZREM', f.open, f.id)

  if f.group_name ~= '' then
    -- An entry that was added without the enqueue script is not in the total yet.
    if not counted then redis.pcall('HINCRBY', f.group, 'total', 1) end
    redis.pcall('HINCRBY', f.group, f.status, 1)
    redis.pcall('XADD', f.group_out, '*', 'id', f.id, 'status', f.status)
    redis.call('EXPIRE', f.group, f.result_ttl)
    redis.call('EXPIRE', f.group_out, f.result_ttl)
  end
  if f.callback ~= '' then redis.pcall('XADD', f.callbacks, '*', 'id', f.id, 'url', f.callback) end
  redis.call('DEL', f.cancel)
end

-- Add to the caller's JSON of a result the attempt, and the trace context if given. The patterns make both values safe
-- inside JSON.
local function completed(json, job, trace)
  local attempt = string.match(redis.call('HGET', job, 'attempt') or '', '^%d+$') or '0'
  json = string.gsub(json, '"attempt":null', '"attempt":' .. attempt, 1)
  if not trace or not string.match(trace, '^[%x-]+$') then return json end
  return string.sub(json, 1, -2) .. ',"traceparent":"' .. trace .. '"}'
end

-- Write a `start` event with a new fence for an ending whose writer has no text, and set the fields of the job hash that
-- START would have set. `f`: job, out (keys), worker, prompt_tokens, group_name, tenant.
local function open_stream(f)
  local fence, known = next_fence(f.job, f.out), redis.call('HMGET', f.job, 'attempt', 'deaths')
  redis.call('XADD', f.out, fence .. '-0', 'type', 'start', 'worker', f.worker, 'attempt', known[1] or '0',
    'prompt_tokens', f.prompt_tokens)
  redis.call('HSET', f.job, 'worker', f.worker, 'fence', fence, 'attempt', known[1] or '0', 'deaths', known[2] or '0')
  if f.group_name ~= '' then redis.call('HSET', f.job, 'group', f.group_name) end
  if f.tenant ~= '' then redis.call('HSET', f.job, 'tenant', f.tenant) end
end
