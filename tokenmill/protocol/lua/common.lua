-- What several scripts share; put in front of each of them.

-- The entry, or nil where it was deleted.
local function live(lane, entry)
  return redis.call('XRANGE', lane, entry, entry)[1]
end

-- True where `consumer` holds the entry and it still exists; its lease then starts anew. An entry that is listed in
-- `returned` was handed back: it is nobody's until a read takes it, and its idle time stays as it is.
local function owned(lane, group, entry, consumer, returned, lane_name)
  if redis.call('ZSCORE', returned, lane_name .. ' ' .. entry) then return false end
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

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function now_ms()
  return math.floor(now_us() / 1000)
end

-- After `delay` ms the next read of any worker takes this entry, which is to be idle for a lease by then.
local function list_returned(returned, lane_name, entry, delay)
  redis.call('ZADD', returned, text(now_ms() + delay), lane_name .. ' ' .. entry)
end

local function next_fence(job, out)
  return text(1 + math.max(tonumber(redis.call('HGET', job, 'fence') or '0'), (last_id(out))))
end

-- A whole number of `meta`, of at most 15 digits as in meta.py, or nil: a misspelt value steers nothing, and a worker's
-- log names it. More digits would be no expiry that Redis takes, and fail a script after its first write.
local function whole(value)
  local digits = value and string.match(value, '^%s*(%d+)%s*$')
  return digits and #digits <= 15 and tonumber(digits) or nil
end

-- How long results and ended streams live: what the worker that started last has published, else the caller's own.
local function lives(meta, result_ttl, stream_ttl)
  local told = redis.call('HMGET', meta, 'result_ttl_seconds', 'stream_ttl_seconds')
  local result = math.max(1, whole(told[1]) or tonumber(result_ttl))
  return text(result), text(math.min(result, math.max(1, whole(told[2]) or tonumber(stream_ttl))))
end

-- Every key that a script touches is in KEYS. Where its name depends on data, the script asks for it before its first
-- write: the reply `AGAIN key …` makes the caller run the script again with these behind its own keys. Nil: all are there.
local function undeclared(names)
  local known, missing = {}, { 'AGAIN' }
  for _, key in ipairs(KEYS) do known[key] = true end
  for _, key in ipairs(names) do
    if not known[key] then missing[#missing + 1] = key end
  end
  return #missing > 1 and missing or nil
end

local function usable(name)
  return name and #name <= 128 and string.match(name, '^[%w_.-]+$') ~= nil
end

-- The keys in which a job of this tenant and this group is counted ('' = none), and the list of all of them.
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

-- The index `open` holds the ids of jobs that have no result yet, so that one whose entry somebody deleted is found.
-- Score: ms of the last look at its entry; negative from the look on that missed it.
local function open_job(index, id)
  redis.pcall('ZADD', index, text(now_ms()), id)
end

-- A tenant's quota counts the members of `booked`: `<lane> <entry>` of each job that the queue took for it; score = us of
-- the last look at that entry. Beside them stand `delayed <id>`, with negative scores and not counted.
local function used_by(booked)
  return redis.call('ZCOUNT', booked, 0, '+inf')
end

local function write_quota(quota, booked, ttl)
  local used = used_by(booked)
  if used > 0 then
    redis.call('SET', quota, used)
  else
    redis.call('SET', quota, 0, 'EX', ttl) -- tenants can be any number, and may never come back
  end
end

-- Take `member` out of a tenant's count.
local function unbook(f, member, ttl)
  keep_only(f.booked, 'zset')
  local removed = redis.call('ZREM', f.booked, member)
  if removed == 1 or f.counted then write_quota(f.quota, f.booked, ttl) end
end

-- Take out of a tenant's count what is gone, since somebody deleted it: a few members a call, the least recently looked
-- at first. Called where a cap refuses a job.
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

-- Counters that others may write too (group, callbacks) can be of a wrong type or hold no number. Lua does not roll back,
-- so that must not stop a script half-way: what cannot be counted is left out.

-- A new life for the id: nothing of an earlier entry is kept but the fence.
local function reset(job)
  redis.call('HDEL', job, 'worker', 'attempt', 'deaths', 'group', 'tenant', 'counted', 'nonce', 'start', 'tries', 'alone',
    'cleared', 'excused', 'callback', 'stream')
  redis.call('PERSIST', job)
end

-- What a job's hash says of an entry of this id that was counted, has no end and is gone, since somebody deleted it; nil
-- where there is none.
local function gone_before(job)
  local held = redis.call('HMGET', job, 'lane', 'entry', 'tenant', 'group', 'counted')
  if not held[5] or not held[1] or not held[2] then return nil end
  local keys = count_keys(held[3] or '', held[4] or '')
  return { member = held[1] .. ' ' .. held[2], group_name = held[4] or '', keys = keys }
end

-- Stop counting the deleted entry that `gone_before` found, since another entry of the id takes its place. Returns true
-- where that entry's group has the name `group_name`: then the group's total stays, and counts the new entry.
local function replace_gone(gone, group_name)
  if not gone then return false end
  local in_total = gone.group_name == group_name
  if gone.keys.group and not in_total then redis.pcall('HINCRBY', gone.keys.group, 'total', -1) end
  if gone.keys.booked then
    unbook(gone.keys, gone.member, 86400)
    redis.call('SREM', gone.keys.running, gone.member)
  end
  return in_total
end

-- Count a queued entry: job hash, group total, tenant quota. `f`: job, quota, booked, group, group_out, open (keys), id,
-- lane, entry, tenant, group_name, callback, stream, nonce. What `gone_before` found is counted no more.
local function book(f, gone)
  local in_total = replace_gone(gone, f.group_name)
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

-- All writes of an ending but the entry's removal; every check is behind us. `f`: job, result, cancel, out, quota, booked,
-- running, group, group_out, callbacks, open (keys), id, status, json, stream, result_ttl, stream_ttl, tenant, group_name,
-- callback, lane, entry.
local function finish(f)
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
    unbook(f, member, f.result_ttl)
    redis.call('SREM', f.running, member)
  end
  redis.call('HDEL', f.job, 'counted')
  redis.call('HSET', f.job, 'state', f.status, 'lane', f.lane, 'entry', f.entry)
  redis.call('EXPIRE', f.job, f.result_ttl)
  redis.pcall('ZREM', f.open, f.id)

  if f.group_name ~= '' then
    -- An entry added without the enqueue script was not in the total yet.
    if not counted then redis.pcall('HINCRBY', f.group, 'total', 1) end
    redis.pcall('HINCRBY', f.group, f.status, 1)
    redis.pcall('XADD', f.group_out, '*', 'id', f.id, 'status', f.status)
    redis.call('EXPIRE', f.group, f.result_ttl)
    redis.call('EXPIRE', f.group_out, f.result_ttl)
  end
  if f.callback ~= '' then redis.pcall('XADD', f.callbacks, '*', 'id', f.id, 'url', f.callback) end
  redis.call('DEL', f.cancel)
end

-- The caller's JSON of a result, with what only the job knows. Both values are safe inside JSON, by their patterns.
local function completed(json, job, trace)
  local attempt = string.match(redis.call('HGET', job, 'attempt') or '', '^%d+$') or '0'
  json = string.gsub(json, '"attempt":null', '"attempt":' .. attempt, 1)
  if not trace or not string.match(trace, '^[%x-]+$') then return json end
  return string.sub(json, 1, -2) .. ',"traceparent":"' .. trace .. '"}'
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
