-- Take up to `count` new entries over all lanes, the higher lane first.
-- KEYS meta high normal low
-- ARGV consumer-group consumer count
-- -> PAUSED, or for each lane its list of {entry, fields}
if redis.call('HGET', KEYS[1], 'paused') == '1' then return 'PAUSED' end
local left, taken = tonumber(ARGV[3]), {}
for i = 2, 4 do
  taken[i - 1] = {}
  if left > 0 then
    local reply = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', left, 'STREAMS', KEYS[i], '>')
    if reply and #reply > 0 then
      taken[i - 1] = reply[1][2]
      left = left - #reply[1][2]
    end
  end
end
return taken
