-- Begin (or begin again) to run an entry: hand out a fence.
-- KEYS lane job result cancel out high normal low
-- ARGV consumer-group entry consumer lane-name open-ttl-s nonce ttl-ms max-attempts prompt-tokens group tenant alone strict
-- -> {status, fence, attempt, deaths, now-ms, reason, tries}; status OK | CANCELLED | EXPIRED | SPENT | DUP | LOST
-- `attempt` counts starts, `tries` those of them that max-attempts counts: not the ones that were handed back politely.
local lane, job, result, cancel, out = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }
local consumers, entry, consumer, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = now_ms()

if not owned(lane, consumers, entry, consumer) then return { 'LOST', '0', 0, 0, now, '', 0 } end
clear_foreign(job, out)
if redis.call('EXISTS', result) == 1 or other_live(job, name, entry, lanes) then
  remove(lane, consumers, entry)
  return { 'DUP', '0', 0, 0, now, '', 0 }
end

local was = redis.call('HMGET', job, 'state', 'lane', 'entry', 'worker', 'fence', 'attempt', 'deaths', 'start',
  'tries', 'alone')
local same = was[2] == name and was[3] == entry
local attempt = same and tonumber(was[6] or '0') or 0
local deaths = same and tonumber(was[7] or '0') or 0
local tries = same and tonumber(was[9] or was[6] or '0') or 0
local running = same and was[1] == 'running'
if running and was[4] == consumer and was[8] == ARGV[6] then
  return { 'OK', was[5], attempt, deaths, now, '', tries } -- our own call, whose first reply was lost
end
if running and was[4] ~= consumer then deaths = deaths + 1 end

-- A key of another type is no cancel; the poll does not see it either.
local reason = redis.pcall('GET', cancel)
if type(reason) == 'string' then return { 'CANCELLED', '0', attempt, deaths, now, reason, tries } end
if ARGV[7] ~= '' and tonumber(string.match(entry, '^%d+')) + tonumber(ARGV[7]) <= now then
  return { 'EXPIRED', '0', attempt, deaths, now, '', tries }
end
-- Who fell beside others, often enough to be a suspect, has a last start alone; unless its producer named a cap.
local guilty = not running or was[10] == '1' or deaths < 2 or ARGV[13] == '1'
if ARGV[8] ~= '' and tries >= tonumber(ARGV[8]) and guilty then
  return { 'SPENT', '0', attempt, deaths, now, '', tries }
end

local fence = next_fence(job, out)
attempt, tries = attempt + 1, tries + 1
local started = redis.pcall('XADD', out, fence .. '-0', 'type', 'start', 'worker', consumer, 'attempt', attempt,
  'prompt_tokens', ARGV[9])
if started.err then return started end
redis.call('EXPIRE', out, ARGV[5])
if not same then reset(job) end
redis.call('PERSIST', job)
redis.call('HSET', job, 'state', 'running', 'lane', name, 'entry', entry, 'worker', consumer, 'fence', fence,
  'attempt', attempt, 'deaths', deaths, 'start', ARGV[6], 'tries', tries, 'alone', ARGV[12])
if ARGV[10] ~= '' then redis.call('HSET', job, 'group', ARGV[10]) end
if ARGV[11] ~= '' then redis.call('HSET', job, 'tenant', ARGV[11]) end
return { 'OK', fence, attempt, deaths, now, '', tries }
