-- Add a job unless its id is taken or the queue is full.
-- KEYS high normal low job result meta quota group group-out delayed-job
-- ARGV lane-name tenant group nonce field value …
-- -> OK entry | EXISTS state | FULL depth | QUOTA used
local lanes = { high = KEYS[1], normal = KEYS[2], low = KEYS[3] }
local name, tenant, group, nonce = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local job, result, meta, quota = KEYS[4], KEYS[5], KEYS[6], KEYS[7]

local held = redis.call('HMGET', job, 'nonce', 'lane', 'entry', 'state')
local taken = redis.call('EXISTS', result) == 1
  or (held[3] and lanes[held[2]] and live(lanes[held[2]], held[3]) ~= nil)
if taken then
  -- The same nonce: our own call, whose first reply was lost.
  if held[1] == nonce then return { 'OK', held[3] } end
  return { 'EXISTS', held[4] or 'finished' }
end
if redis.call('EXISTS', KEYS[10]) == 1 then return { 'EXISTS', 'delayed' } end

local caps = redis.call('HMGET', meta, 'max_depth', 'max_per_tenant')
local depth = 0
for i = 1, 3 do depth = depth + redis.call('XLEN', KEYS[i]) end
if caps[1] and depth >= tonumber(caps[1]) then return { 'FULL', depth } end
local used = number_at(quota)
if caps[2] and tenant ~= '' and used >= tonumber(caps[2]) then return { 'QUOTA', used } end

local fields = {}
for i = 5, #ARGV do fields[#fields + 1] = ARGV[i] end
local entry = redis.call('XADD', lanes[name], '*', unpack(fields))
book({ job = job, quota = quota, group = KEYS[8], group_out = KEYS[9], lane = name, entry = entry, tenant = tenant,
  group_name = group, nonce = nonce })
return { 'OK', entry }
