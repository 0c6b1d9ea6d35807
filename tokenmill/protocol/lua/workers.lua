-- Read the hashes of a queue's live workers. Consumers of the lanes without a hash are dead workers.
-- KEYS high normal low, then for each known worker its hash
-- ARGV request {consumer_group, root}. `root`: the beginning of the key of a worker's hash.
-- -> for each hash that exists {key, fields} | AGAIN key …
local request, names, seen = cjson.decode(ARGV[1]), {}, {}

for lane = 1, 3 do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[lane], request.consumer_group)
  if consumers.err then
    -- A lane that no producer and no worker has used yet does not exist.
    local reason = tostring(consumers.err)
    local unused = string.find(reason, 'no such key', 1, true) or string.find(reason, 'NOGROUP', 1, true)
    if not unused then return consumers end
  end
  for _, consumer in ipairs(consumers) do
    for i = 1, #consumer, 2 do
      local key = consumer[i] == 'name' and request.root .. consumer[i + 1]
      if key and not seen[key] then
        seen[key], names[#names + 1] = true, key
      end
    end
  end
end
local again = undeclared(names)
if again then return again end

local found = {}
for i = 4, #KEYS do
  local fields = redis.pcall('HGETALL', KEYS[i])
  if fields.err then
    if not string.find(tostring(fields.err), 'WRONGTYPE', 1, true) then return fields end
  elseif #fields > 0 then
    found[#found + 1] = { KEYS[i], fields }
  end
end
return found
