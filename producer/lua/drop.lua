-- Removes dead letters.
-- KEYS  dead letters, their bytes, events    ARGV  ids
-- Returns how many there were.
local dropped = 0
for index = 1, #ARGV do
  if take_letter(KEYS[1], KEYS[2], ARGV[index]) then
    dropped = dropped + 1
  end
end
if dropped > 0 then
  redis.call('HINCRBY', KEYS[3], 'dead_dropped:operator', dropped)
end
return dropped
