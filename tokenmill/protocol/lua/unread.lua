-- Count the entries of each lane that no worker holds: entries never read, and entries handed back whose delay is over.
-- KEYS high normal low returned
-- ARGV request {consumer_group, most}
-- -> the count for each lane, each at most `most`
local streams, returned = { KEYS[1], KEYS[2], KEYS[3] }, KEYS[4]
local request = cjson.decode(ARGV[1])

local found, names = { 0, 0, 0 }, { high = 1, normal = 2, low = 3 }
for _, member in ipairs(redis.call('ZRANGEBYSCORE', returned, '-inf', now_ms(), 'LIMIT', 0, 512)) do
  local lane = names[string.match(member, '^%a+')]
  if lane then found[lane] = found[lane] + 1 end
end
for i, stream in ipairs(streams) do
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, group in ipairs(groups.err and {} or groups) do
    local info = {}
    for at = 1, #group, 2 do info[group[at]] = group[at + 1] end
    if info['name'] == request.consumer_group then
      local after = '(' .. info['last-delivered-id']
      found[i] = found[i] + #redis.call('XRANGE', stream, after, '+', 'COUNT', request.most)
    end
  end
  found[i] = math.min(found[i], request.most)
end
return found
