-- Begin (or begin again) to run an entry: hand out a fence.
-- KEYS lane job result cancel out high normal low
-- ARGV consumer-group entry consumer lane-name open-ttl-s nonce ttl-ms max-attempts prompt-tokens group tenant
-- -> {status, fence, attempt, deaths, now-ms, reason}; status OK | CANCELLED | EXPIRED | SPENT | DUP | LOST
local lane, job, result, cancel, out = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }
local consumers, entry, consumer, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local now = now_ms()

if not owned(lane, consumers, entry, consumer) then return { 'LOST', '0', 0, 0, now, '' } end
if redis.call('EXISTS', result) == 1 or other_live(job, name, entry, lanes) then
  remove(lane, consumers, entry)
  return { 'DUP', '0', 0, 0, now, '' }
end

local was = redis.call('HMGET', job, 'state', 'lane', 'entry', 'worker', 'fence', 'attempt', 'deaths', 'start')
local same = was[2] == name and was[3] == entry
local attempt = same and tonumber(was[6] or '0') or 0
local deaths = same and tonumber(was[7] or '0') or 0
local running = same and was[1] == 'running'
if running and was[4] == consumer and was[8] == ARGV[6] then
  return { 'OK', was[5], attempt, deaths, now, '' } -- our own call, whose first reply was lost
end
if running and was[4] ~= consumer then deaths = deaths + 1 end

local reason = redis.call('GET', cancel)
if reason then return { 'CANCELLED', '0', attempt, deaths, now, reason } end
if ARGV[7] ~= '' and tonumber(string.match(entry, '^%d+')) + tonumber(ARGV[7]) <= now then
  return { 'EXPIRED', '0', attempt, deaths, now, '' }
end
if ARGV[8] ~= '' and attempt >= tonumber(ARGV[8]) then return { 'SPENT', '0', attempt, deaths, now, '' } end

local fence = next_fence(job, out)
attempt = attempt + 1
local started = redis.pcall('XADD', out, fence .. '-0', 'type', 'start', 'worker', consumer, 'attempt', attempt,
  'prompt_tokens', ARGV[9])
if started.err then return started end
redis.call('EXPIRE', out, ARGV[5])
if not same then reset(job) end
redis.call('PERSIST', job)
redis.call('HSET', job, 'state', 'running', 'lane', name, 'entry', entry, 'worker', consumer, 'fence', fence,
  'attempt', attempt, 'deaths', deaths, 'start', ARGV[6])
if ARGV[10] ~= '' then redis.call('HSET', job, 'group', ARGV[10]) end
if ARGV[11] ~= '' then redis.call('HSET', job, 'tenant', ARGV[11]) end
return { 'OK', fence, attempt, deaths, now, '' }
