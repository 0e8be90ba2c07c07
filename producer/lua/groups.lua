-- Creates the streams and their consumer group where they are missing.
-- KEYS  turns, streams    ARGV  group
write_at_maxmemory(KEYS[1])
for index = 2, #KEYS do
  redis.pcall('XGROUP', 'CREATE', KEYS[index], ARGV[1], '0', 'MKSTREAM')
end
