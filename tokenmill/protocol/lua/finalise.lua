#!lua flags=allow-oom
-- The one ending of an entry that the caller holds: result, rest of the text, final event, bookkeeping, ack and delete.
-- KEYS lane job result cancel out high normal low dead callbacks quota group group-out running reading
--      returned booked open
-- ARGV consumer-group entry consumer lane-name id fence published status json stream result-ttl stream-ttl group callback
--      prompt-tokens dead-code dead-reason dead-attempts dead-body dead-truncated dead-maxlen
--      tenant, then six an event: n index text tokens token-ids logprobs
-- An empty fence: no START came before, so a start is written first. `published`: last n the caller knows to be out.
-- -> OK | DUP | LOST | GONE (the stream lacks what was published: START again, republish the whole text) | AGAIN key …
local lane, job, result, cancel, out = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }
local consumers, entry, consumer, name, id, fence = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local done = redis.call('EXISTS', result) == 1
if not owned(lane, consumers, entry, consumer, KEYS[16], name) then
  -- Ended already and by us or by who took over: the caller's first reply may have been lost.
  if done and not live(lane, entry) then return 'DUP' end
  return 'LOST'
end
clear_foreign(job, out)
if done or other_live(job, name, entry, lanes) then
  remove(lane, consumers, entry)
  return 'DUP'
end
local last_fence, last_n = last_id(out)
if fence ~= '' then
  local held = redis.call('HMGET', job, 'lane', 'entry', 'fence')
  if held[1] ~= name or held[2] ~= entry or held[3] ~= fence or last_fence > tonumber(fence) then return 'LOST' end
  if last_fence < tonumber(fence) or last_n < tonumber(ARGV[7]) then return 'GONE' end
end

local was = redis.call('HMGET', job, 'lane', 'entry')
local replaces = fence == '' and (was[1] ~= name or was[2] ~= entry)
local gone = replaces and gone_before(job)
local again = gone and undeclared(gone.keys.all)
if again then return again end

redis.call('HDEL', KEYS[15], name .. ' ' .. entry)
if replaces then
  local in_total = replace_gone(gone, ARGV[13])
  reset(job)
  if in_total and ARGV[13] ~= '' then redis.call('HSET', job, 'counted', '1') end
end
if fence == '' then
  open({ job = job, out = out, worker = consumer, prompt_tokens = ARGV[15], group_name = ARGV[13], tenant = ARGV[22] })
end
for at = 23, #ARGV, 6 do
  if tonumber(ARGV[at]) > last_n then
    local fields = { 'type', 'token', 'index', ARGV[at + 1], 'text', ARGV[at + 2], 'tokens', ARGV[at + 3] }
    if ARGV[at + 4] ~= '' then fields[#fields + 1] = 'token_ids'; fields[#fields + 1] = ARGV[at + 4] end
    if ARGV[at + 5] ~= '' then fields[#fields + 1] = 'logprobs'; fields[#fields + 1] = ARGV[at + 5] end
    redis.call('XADD', out, 'NOMKSTREAM', fence .. '-' .. ARGV[at], unpack(fields))
  end
end
if ARGV[16] ~= '' then
  redis.call('XADD', KEYS[9], 'MAXLEN', '~', ARGV[21], '*', 'id', id, 'lane', name, 'entry', entry, 'code', ARGV[16],
    'reason', ARGV[17], 'attempts', ARGV[18], 'body', ARGV[19], 'truncated', ARGV[20])
end
finish({ job = job, result = result, cancel = cancel, out = out, quota = KEYS[11], booked = KEYS[17], group = KEYS[12],
  group_out = KEYS[13], callbacks = KEYS[10], running = KEYS[14], open = KEYS[18], id = id, status = ARGV[8], json = ARGV[9], stream = ARGV[10],
  result_ttl = ARGV[11], stream_ttl = ARGV[12], tenant = ARGV[22], group_name = ARGV[13], callback = ARGV[14],
  lane = name, entry = entry })
remove(lane, consumers, entry)
return 'OK'
