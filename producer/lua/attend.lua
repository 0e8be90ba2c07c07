-- Marks a live worker of a model, and publishes the model's rate limits.
-- KEYS  workers, limits    ARGV  consumer, expiry in ms, then limit, value, ... (none: no limits)
local now = now_ms()
forget_dead(KEYS[1], now)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[2]) * 2)
redis.call('DEL', KEYS[2])
if #ARGV > 2 then
  redis.call('HSET', KEYS[2], unpack(ARGV, 3))
end
