-- Creates the streams and their consumer group where they are missing.
-- KEYS  turns, streams    ARGV  group
write_at_maxmemory(KEYS[1])
for index = 2, #KEYS do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[index], ARGV[1], '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then
    return made
  end
end
