-- A turn starts: takes the oldest bell and covers the model.
-- KEYS  bells, turns    ARGV  consumer, turn lease in ms
local now = now_ms()
redis.call('ZPOPMIN', KEYS[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), ARGV[1])
redis.call('PEXPIRE', KEYS[2], tonumber(ARGV[2]) * 2)
return now
