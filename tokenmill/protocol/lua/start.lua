-- Start an entry, or start it again, and give its worker a fence.
-- KEYS lane job result cancel out high normal low meta running returned open
-- ARGV request {consumer_group, consumer, lane, entry, id, tenant, group, open_ttl_s, nonce, ttl_ms, max_attempts,
--      prompt_tokens, alone, strict}
-- -> {status, fence, attempt, deaths, now_ms, reason, tries}; status OK | CANCELLED | EXPIRED | SPENT | CAPPED | DUP | LOST;
--    or AGAIN key …
-- `attempt` counts all starts; `tries` counts the starts that max_attempts limits, without those that were handed back
-- through no fault of the job.
local lane, job, result, cancel, out = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes, meta, running_set = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }, KEYS[9], KEYS[10]
local returned, index = KEYS[11], KEYS[12]
local request = cjson.decode(ARGV[1])
local consumer, name, entry = request.consumer, request.lane, request.entry
local now = now_ms()

-- Return true if this tenant has reached its cap of running jobs. At the cap, each call also looks at a few of the counted
-- entries, and removes those that were deleted while they ran.
local function capped(cap, member)
  if redis.call('SISMEMBER', running_set, member) == 1 or redis.call('SCARD', running_set) < cap then return false end
  for _, other in ipairs(redis.call('SRANDMEMBER', running_set, 8)) do
    local other_lane, other_entry = string.match(other, '^(%a+) ([%d-]+)$')
    if not lanes[other_lane] or not live(lanes[other_lane], other_entry) then redis.call('SREM', running_set, other) end
  end
  return redis.call('SCARD', running_set) >= cap
end

-- Hand the entry back for a delay that grows with the number of returned entries, so that repeated tries cost little.
local function park(lease)
  local delay = math.floor(math.min(lease / 2, math.max(1000, 10 * redis.call('ZCARD', returned))))
  redis.call('XCLAIM', lane, request.consumer_group, consumer, 0, entry, 'IDLE', text(lease - delay), 'JUSTID')
  list_returned(returned, name, entry, delay)
end

if not owned(lane, returned, request) then return { 'LOST', '0', 0, 0, now, '', 0 } end
clear_foreign(job, out)
if redis.call('EXISTS', result) == 1 or other_live(job, name, entry, lanes) then
  remove(lane, request.consumer_group, entry)
  return { 'DUP', '0', 0, 0, now, '', 0 }
end

local was = redis.call('HMGET', job, 'state', 'lane', 'entry', 'worker', 'fence', 'attempt', 'deaths', 'start',
  'tries', 'alone', 'excused')
local same = was[2] == name and was[3] == entry
-- If an earlier entry of this id was counted and then deleted, this entry takes its place in the counts.
local predecessor = not same and deleted_predecessor(job)
local again = predecessor and undeclared(predecessor.keys.all)
if again then return again end
local attempt = same and tonumber(was[6] or '0') or 0
local deaths = same and tonumber(was[7] or '0') or 0
local tries = same and tonumber(was[9] or was[6] or '0') or 0
local running = same and was[1] == 'running'
if running and was[4] == consumer and was[8] == request.nonce then
  return { 'OK', was[5], attempt, deaths, now, '', tries } -- the caller repeats a call whose reply was lost
end
local taken_over = running and was[4] ~= consumer
-- The last worker was shutting down, and was killed before it could hand the job back: neither death nor start counts.
local excused = taken_over and was[11] == was[4]
if excused then tries = math.max(0, tries - 1) elseif taken_over then deaths = deaths + 1 end

-- A cancel key of another type is ignored here, as it is by the workers' poll.
local reason = redis.pcall('GET', cancel)
if type(reason) == 'string' then return { 'CANCELLED', '0', attempt, deaths, now, reason, tries } end
if request.ttl_ms and tonumber(string.match(entry, '^%d+')) + request.ttl_ms <= now then
  return { 'EXPIRED', '0', attempt, deaths, now, '', tries }
end
-- A suspect (two deaths) that has never run alone gets one more start, alone, unless its producer set max_attempts.
local spent = not running or excused or was[10] == '1' or deaths < 2 or request.strict
if request.max_attempts and tries >= request.max_attempts and spent then
  return { 'SPENT', '0', attempt, deaths, now, '', tries }
end

local limits = redis.call('HMGET', meta, 'max_running_per_tenant', 'lease_ms')
local cap, member = request.tenant and whole(limits[1]), name .. ' ' .. entry
if cap and capped(cap, member) then
  park(whole(limits[2]) or 30000)
  return { 'CAPPED', '0', attempt, deaths, now, '', tries }
end

local fence = next_fence(job, out)
attempt, tries = attempt + 1, tries + 1
local started = redis.pcall('XADD', out, fence .. '-0', 'type', 'start', 'worker', consumer, 'attempt', attempt,
  'prompt_tokens', request.prompt_tokens)
if started.err then return started end
if cap then redis.call('SADD', running_set, member) end
redis.call('EXPIRE', out, request.open_ttl_s)
if not same then
  local in_total = uncount_predecessor(predecessor, request.group or '')
  reset(job)
  if in_total and request.group then redis.call('HSET', job, 'counted', '1') end
end
if taken_over then redis.call('HDEL', job, 'excused') end
redis.call('PERSIST', job)
open_job(index, request.id)
redis.call('HSET', job, 'state', 'running', 'lane', name, 'entry', entry, 'worker', consumer, 'fence', fence,
  'attempt', attempt, 'deaths', deaths, 'start', request.nonce, 'tries', tries, 'alone', request.alone and '1' or '0')
if request.group then redis.call('HSET', job, 'group', request.group) end
if request.tenant then redis.call('HSET', job, 'tenant', request.tenant) end
return { 'OK', fence, attempt, deaths, now, '', tries }
