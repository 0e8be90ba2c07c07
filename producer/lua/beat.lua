-- A worker's heartbeat: its report, and the specs of its models.
-- KEYS  report, models, any sorted set    ARGV  expiry in ms, report, then model, spec, ...
write_at_maxmemory(KEYS[3])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
for index = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[index], ARGV[index + 1])
end
