#!lua flags=allow-oom
-- End a job whose entry the caller holds: unpublished text, final event, result, group, quota, callback, acknowledge, delete.
-- KEYS lane job result cancel out high normal low dead callbacks quota group group_out running reading returned booked open
-- ARGV request {consumer_group, consumer, lane, entry, id, fence, published, status, stream, result_ttl_s, stream_ttl_s, tenant,
--      group, callback, prompt_tokens, events, dead}, result (JSON), body of the dead letter (any bytes; '' = none).
--      fence: of START; absent if the job was not started, then a `start` event is written first. published: last n that the
--      caller knows to be in the stream. events: list of {n, index, text, tokens, token_ids, logprobs}, the last two as JSON
--      texts ('' = none). dead: absent, or {code, reason, attempts, truncated, maxlen}.
-- -> OK | DUP | LOST | GONE (the stream lacks what was published: START again and republish the whole text) | AGAIN key …
local lane, job, result, cancel, out = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lanes, dead, callbacks = { high = KEYS[6], normal = KEYS[7], low = KEYS[8] }, KEYS[9], KEYS[10]
local quota, group, group_out, running, reading = KEYS[11], KEYS[12], KEYS[13], KEYS[14], KEYS[15]
local returned, booked, index = KEYS[16], KEYS[17], KEYS[18]
local request, result_json, dead_body = cjson.decode(ARGV[1]), ARGV[2], ARGV[3]
local entry, fence, letter = request.entry, request.fence, request.dead
local tenant, group_name = request.tenant or '', request.group or ''

local done = redis.call('EXISTS', result) == 1
if not owned(lane, returned, request) then
  -- Ended already, by this caller (whose first reply may have been lost) or by a worker that took the job over.
  if done and not live(lane, entry) then return 'DUP' end
  return 'LOST'
end
clear_foreign(job, out)
if done or other_live(job, request.lane, entry, lanes) then
  remove(lane, request.consumer_group, entry)
  return 'DUP'
end
local last_fence, last_n = last_id(out)
if fence then
  local held = redis.call('HMGET', job, 'lane', 'entry', 'fence')
  if held[1] ~= request.lane or held[2] ~= entry or held[3] ~= fence or last_fence > tonumber(fence) then return 'LOST' end
  if last_fence < tonumber(fence) or last_n < request.published then return 'GONE' end
end

local was = redis.call('HMGET', job, 'lane', 'entry')
local replaces = not fence and (was[1] ~= request.lane or was[2] ~= entry)
local predecessor = replaces and deleted_predecessor(job)
local again = predecessor and undeclared(predecessor.keys.all)
if again then return again end

redis.call('HDEL', reading, request.lane .. ' ' .. entry)
if replaces then
  local in_total = uncount_predecessor(predecessor, group_name)
  reset(job)
  if in_total and group_name ~= '' then redis.call('HSET', job, 'counted', '1') end
end
if not fence then
  open_stream({ job = job, out = out, worker = request.consumer, prompt_tokens = request.prompt_tokens,
    group_name = group_name, tenant = tenant })
end
for _, event in ipairs(request.events) do
  local n, token_ids, logprobs = event[1], event[5], event[6]
  if n > last_n then
    local fields = { 'type', 'token', 'index', event[2], 'text', event[3], 'tokens', event[4] }
    if token_ids ~= '' then fields[#fields + 1] = 'token_ids'; fields[#fields + 1] = token_ids end
    if logprobs ~= '' then fields[#fields + 1] = 'logprobs'; fields[#fields + 1] = logprobs end
    redis.call('XADD', out, 'NOMKSTREAM', fence .. '-' .. text(n), unpack(fields))
  end
end
if letter then
  redis.call('XADD', dead, 'MAXLEN', '~', letter.maxlen, '*', 'id', request.id, 'lane', request.lane, 'entry', entry,
    'code', letter.code, 'reason', letter.reason, 'attempts', letter.attempts, 'body', dead_body,
    'truncated', letter.truncated)
end
write_ending({ job = job, result = result, cancel = cancel, out = out, quota = quota, booked = booked, group = group,
  group_out = group_out, callbacks = callbacks, running = running, open = index, id = request.id, status = request.status,
  json = result_json, stream = request.stream, result_ttl = request.result_ttl_s, stream_ttl = request.stream_ttl_s,
  tenant = tenant, group_name = group_name, callback = request.callback or '', lane = request.lane, entry = entry })
remove(lane, request.consumer_group, entry)
return 'OK'
