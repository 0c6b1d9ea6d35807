-- Append the token events of one engine step.
-- KEYS the output stream of each job
-- ARGV JSON list with five values for each event: number of its key, ID, index, text, tokens; then, if any event has these, a
--      JSON list with two texts for each event: token ids and logprobs, as JSON ('' = none)
-- -> the refused events as a flat list: event number (from 0), reason, last ID …; reason GONE | SMALL | another error's text.
-- After a refusal that is not a repeated write, later events of that stream are refused too, so that no gap can arise.
local refused, barred = {}, {}
local function refuse(number, why, last)
  refused[#refused + 1] = number
  refused[#refused + 1] = why
  refused[#refused + 1] = last
end

local events = cjson.decode(ARGV[1])
local extra = ARGV[2] and cjson.decode(ARGV[2]) or {}
for number = 0, #events / 5 - 1 do
  local at = 5 * number + 1
  local out = KEYS[events[at]]
  if barred[out] then
    refuse(number, barred[out][1], barred[out][2])
  else
    local id, reply = events[at + 1], nil
    local ids, logprobs = extra[2 * number + 1] or '', extra[2 * number + 2] or ''
    if ids == '' and logprobs == '' then
      reply = redis.pcall('XADD', out, 'NOMKSTREAM', id, 'type', 'token', 'index', events[at + 2], 'text', events[at + 3],
        'tokens', events[at + 4])
    else
      local fields = { 'type', 'token', 'index', events[at + 2], 'text', events[at + 3], 'tokens', events[at + 4] }
      if ids ~= '' then fields[#fields + 1] = 'token_ids'; fields[#fields + 1] = ids end
      if logprobs ~= '' then fields[#fields + 1] = 'logprobs'; fields[#fields + 1] = logprobs end
      reply = redis.pcall('XADD', out, 'NOMKSTREAM', id, unpack(fields))
    end
    if not reply then
      barred[out] = { 'GONE', '' }
      refuse(number, 'GONE', '')
    elseif type(reply) == 'table' and reply.err then
      local why = tostring(reply.err)
      -- Redis checks memory once for a whole script, so nothing was written: the caller may repeat the call.
      if string.find(why, 'OOM', 1, true) == 1 then return reply end
      if string.find(why, 'equal or smaller', 1, true) then
        local first, second = last_id(out)
        local fence, n = string.match(id, '^(%d+)-(%d+)$')
        local last = text(first) .. '-' .. text(second)
        if first ~= tonumber(fence) or second < tonumber(n) then barred[out] = { 'SMALL', last } end
        refuse(number, 'SMALL', last)
      else
        barred[out] = { why, '' }
        refuse(number, why, '')
      end
    end
  end
end
return refused
