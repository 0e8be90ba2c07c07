-- Marks a live worker of a model.
-- KEYS  workers    ARGV  consumer, expiry in ms
local now = now_ms()
forget_dead(KEYS[1], now)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[2]) * 2)
