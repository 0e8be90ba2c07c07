-- A turn ends, and rings if work is left that nobody covers.
-- KEYS  bells, turns, bell queue, streams    ARGV  group, consumer, bell ttl in ms, bell message
-- Returns 1 if it rang.
local now = now_ms()
redis.call('ZREM', KEYS[2], ARGV[2])
for index = 4, #KEYS do
  if waiting(KEYS[index], ARGV[1]) > 0 then
    if covers(KEYS[1], KEYS[2], now) == 0 then
      ring(KEYS[1], KEYS[3], ARGV[4], now, tonumber(ARGV[3]))
      return 1
    end
    return 0
  end
end
return 0
