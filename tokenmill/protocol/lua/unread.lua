-- Count the entries of each lane that no worker holds: those never read, and those handed back whose delay is over.
-- KEYS high normal low returned
-- ARGV consumer-group, most
-- -> for each lane how many, up to `most`
local found, names = { 0, 0, 0 }, { high = 1, normal = 2, low = 3 }
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now_ms(), 'LIMIT', 0, 512)) do
  local lane = names[string.match(member, '^%a+')]
  if lane then found[lane] = found[lane] + 1 end
end
for i = 1, 3 do
  local groups = redis.pcall('XINFO', 'GROUPS', KEYS[i])
  for _, group in ipairs(groups.err and {} or groups) do
    local told = {}
    for at = 1, #group, 2 do told[group[at]] = group[at + 1] end
    if told['name'] == ARGV[1] then
      found[i] = found[i] + #redis.call('XRANGE', KEYS[i], '(' .. told['last-delivered-id'], '+', 'COUNT', ARGV[2])
    end
  end
  found[i] = math.min(found[i], tonumber(ARGV[2]))
end
return found
