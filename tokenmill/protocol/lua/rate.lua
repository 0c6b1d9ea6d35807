-- Charge requests and tokens to a caller, unless the charge exceeds what the caller may use within any minute. Or give back
-- tokens of an earlier charge.
--
-- A minute is the present slot of a quarter of a second, by Redis' clock, and the 240 slots before it. The hash has the sums
-- of these slots (`requests`, `tokens`), the parts of each slot (`r<slot>`, `t<slot>`), and the first slot that the sums have
-- (`oldest`).
-- KEYS rate
-- ARGV request {requests, tokens, rpm, tpm} or {slot, give_back}. Without `rpm` or `tpm` there is no such limit.
-- -> OK slot | WAIT ms name: the charge fits after `ms` if nothing else is charged; `name` of the limit: `rpm` or `tpm`
local SLOT_MS, SLOTS, TTL_S = 250, 240, 62
local rate, request, now = KEYS[1], cjson.decode(ARGV[1]), now_ms()
local slot = math.floor(now / SLOT_MS)

keep_only(rate, 'hash')
local held = redis.call('HMGET', rate, 'oldest', 'requests', 'tokens')
local oldest, used = tonumber(held[1] or slot), { r = tonumber(held[2] or '0'), t = tonumber(held[3] or '0') }
if oldest > slot or oldest < slot - 4 * SLOTS then -- Redis' clock was set
  redis.call('DEL', rate)
  oldest, used = slot, { r = 0, t = 0 }
end

local function add(at, kind, amount)
  if amount == 0 then return end
  used[kind] = used[kind] + amount
  redis.call('HINCRBY', rate, kind .. text(at), text(amount))
end

local function parts(at)
  local found = redis.call('HMGET', rate, 'r' .. text(at), 't' .. text(at))
  return { r = tonumber(found[1] or '0'), t = tonumber(found[2] or '0') }
end

local all -- the hash's values by field, once they are needed

-- Return the ms until `amount` more fits below the limit `most`; nil if it fits now. An amount above the limit fits where
-- nothing else is charged.
local function wait_ms(kind, amount, most)
  local left = used[kind]
  if not most or left <= 0 or left + amount <= most then return nil end
  if not all then
    local flat = redis.call('HGETALL', rate)
    all = {}
    for i = 1, #flat, 2 do all[flat[i]] = flat[i + 1] end
  end
  for at = oldest, slot do
    left = left - tonumber(all[kind .. text(at)] or '0')
    if left <= 0 or left + amount <= most then return (at + SLOTS + 1) * SLOT_MS - now end
  end
  return (slot + SLOTS + 1) * SLOT_MS - now
end

while oldest < slot - SLOTS do
  local gone = parts(oldest)
  used.r, used.t = used.r - gone.r, used.t - gone.t
  redis.call('HDEL', rate, 'r' .. text(oldest), 't' .. text(oldest))
  oldest = oldest + 1
end

local reply = { 'OK', text(slot) }
if request.slot then
  if request.slot >= oldest then add(request.slot, 't', -math.min(request.give_back, parts(request.slot).t)) end
else
  local by_requests = wait_ms('r', request.requests, request.rpm)
  local by_tokens = wait_ms('t', request.tokens, request.tpm)
  if by_requests and by_requests >= (by_tokens or 0) then
    reply = { 'WAIT', by_requests, 'rpm' }
  elseif by_tokens then
    reply = { 'WAIT', by_tokens, 'tpm' }
  else
    add(slot, 'r', request.requests)
    add(slot, 't', request.tokens)
  end
end
redis.call('HSET', rate, 'oldest', text(oldest), 'requests', text(used.r), 'tokens', text(used.t))
redis.call('EXPIRE', rate, TTL_S)
return reply
