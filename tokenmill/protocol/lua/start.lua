-- Begin (or begin again) to run an entry: hand out a fence.
-- KEYS lane job result cancel out high normal low meta running returned quota booked open
-- ARGV consumer-group entry consumer lane-name open-ttl-s nonce ttl-ms max-attempts prompt-tokens group tenant alone strict
--      id
-- -> {status, fence, attempt, deaths, now-ms, reason, tries}; status OK | CANCELLED | EXPIRED | SPENT | CAPPED | DUP | LOST
--    or AGAIN key …
-- `attempt` counts starts, `tries` those of them that max-attempts counts: not the ones that were handed back politely.
local lane, job, result, cancel, out = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }
local consumers, entry, consumer, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = now_ms()

-- True where this tenant may have no further running job. Who left the lane without an end (somebody deleted its entry) is
-- found here, a few at a time.
local function capped(cap, member)
  if redis.call('SISMEMBER', KEYS[10], member) == 1 or redis.call('SCARD', KEYS[10]) < cap then return false end
  for _, other in ipairs(redis.call('SRANDMEMBER', KEYS[10], 8)) do
    local other_lane, other_entry = string.match(other, '^(%a+) ([%d-]+)$')
    if not lanes[other_lane] or not live(lanes[other_lane], other_entry) then redis.call('SREM', KEYS[10], other) end
  end
  return redis.call('SCARD', KEYS[10]) >= cap
end

-- Hand it back for a while: longer where many wait, so that looking at them again and again costs little.
local function park(lease)
  local delay = math.floor(math.min(lease / 2, math.max(1000, 10 * redis.call('ZCARD', KEYS[11]))))
  redis.call('XCLAIM', lane, consumers, consumer, 0, entry, 'IDLE', text(lease - delay), 'JUSTID')
  list_returned(KEYS[11], name, entry, delay)
end

if not owned(lane, consumers, entry, consumer, KEYS[11], name) then return { 'LOST', '0', 0, 0, now, '', 0 } end
clear_foreign(job, out)
if redis.call('EXISTS', result) == 1 or other_live(job, name, entry, lanes) then
  remove(lane, consumers, entry)
  return { 'DUP', '0', 0, 0, now, '', 0 }
end

local was = redis.call('HMGET', job, 'state', 'lane', 'entry', 'worker', 'fence', 'attempt', 'deaths', 'start',
  'tries', 'alone', 'excused')
local same = was[2] == name and was[3] == entry
-- An entry of this id that was counted is gone, and this one has come in its place.
local gone = not same and gone_before(job)
local again = gone and undeclared(gone.keys.all)
if again then return again end
local attempt = same and tonumber(was[6] or '0') or 0
local deaths = same and tonumber(was[7] or '0') or 0
local tries = same and tonumber(was[9] or was[6] or '0') or 0
local running = same and was[1] == 'running'
if running and was[4] == consumer and was[8] == ARGV[6] then
  return { 'OK', was[5], attempt, deaths, now, '', tries } -- our own call, whose first reply was lost
end
local taken = running and was[4] ~= consumer
-- Its last worker was told to end, and was killed before it could hand the job back: neither death nor start counts.
local excused = taken and was[11] == was[4]
if excused then tries = math.max(0, tries - 1) elseif taken then deaths = deaths + 1 end

-- A key of another type is no cancel; the poll does not see it either.
local reason = redis.pcall('GET', cancel)
if type(reason) == 'string' then return { 'CANCELLED', '0', attempt, deaths, now, reason, tries } end
if ARGV[7] ~= '' and tonumber(string.match(entry, '^%d+')) + tonumber(ARGV[7]) <= now then
  return { 'EXPIRED', '0', attempt, deaths, now, '', tries }
end
-- Who fell beside others, often enough to be a suspect, has a last start alone; unless its producer named a cap.
local guilty = not running or excused or was[10] == '1' or deaths < 2 or ARGV[13] == '1'
if ARGV[8] ~= '' and tries >= tonumber(ARGV[8]) and guilty then
  return { 'SPENT', '0', attempt, deaths, now, '', tries }
end

local limits = redis.call('HMGET', KEYS[9], 'max_running_per_tenant', 'lease_ms')
local cap, member = ARGV[11] ~= '' and whole(limits[1]), name .. ' ' .. entry
if cap and capped(cap, member) then
  park(whole(limits[2]) or 30000)
  return { 'CAPPED', '0', attempt, deaths, now, '', tries }
end

local fence = next_fence(job, out)
attempt, tries = attempt + 1, tries + 1
local started = redis.pcall('XADD', out, fence .. '-0', 'type', 'start', 'worker', consumer, 'attempt', attempt,
  'prompt_tokens', ARGV[9])
if started.err then return started end
if cap then redis.call('SADD', KEYS[10], member) end
redis.call('EXPIRE', out, ARGV[5])
if not same then
  local in_total = replace_gone(gone, ARGV[10])
  reset(job)
  if in_total and ARGV[10] ~= '' then redis.call('HSET', job, 'counted', '1') end
end
if taken then redis.call('HDEL', job, 'excused') end
redis.call('PERSIST', job)
open_job(KEYS[14], ARGV[14])
redis.call('HSET', job, 'state', 'running', 'lane', name, 'entry', entry, 'worker', consumer, 'fence', fence,
  'attempt', attempt, 'deaths', deaths, 'start', ARGV[6], 'tries', tries, 'alone', ARGV[12])
if ARGV[10] ~= '' then redis.call('HSET', job, 'group', ARGV[10]) end
if ARGV[11] ~= '' then redis.call('HSET', job, 'tenant', ARGV[11]) end
return { 'OK', fence, attempt, deaths, now, '', tries }
