-- Look which lanes have entries that no worker has read.
-- KEYS high normal low
-- ARGV consumer-group, most
-- -> for each lane how many, up to `most`
local found = {}
for i = 1, 3 do
  found[i] = 0
  local groups = redis.pcall('XINFO', 'GROUPS', KEYS[i])
  for _, group in ipairs(groups.err and {} or groups) do
    local told = {}
    for at = 1, #group, 2 do told[group[at]] = group[at + 1] end
    if told['name'] == ARGV[1] then
      found[i] = #redis.call('XRANGE', KEYS[i], '(' .. told['last-delivered-id'], '+', 'COUNT', ARGV[2])
    end
  end
end
return found
