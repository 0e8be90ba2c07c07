-- Hands entries back unstarted: the next reclaim takes them at once, this delivery uncounted.
-- KEYS  bells, bell queue, streams
-- ARGV  group, consumer, idle in ms, bell ttl in ms, bell message, then stream index, id, deliveries before, ...
-- Returns how many were handed back; more than none rings.
local group, consumer = ARGV[1], ARGV[2]
local released = 0
for index = 6, #ARGV, 3 do
  local stream, id = KEYS[tonumber(ARGV[index]) + 3], ARGV[index + 1]
  if redis.call('EXISTS', stream) == 1 then
    ensure_group(stream, group)
    if redis.call('XPENDING', stream, group, id, id, 1, consumer)[1] then
      redis.call('XCLAIM', stream, group, 'released', 0, id, 'IDLE', ARGV[3], 'RETRYCOUNT', ARGV[index + 2], 'JUSTID')
      released = released + 1
    end
  end
end
if released > 0 then
  ring(KEYS[1], KEYS[2], ARGV[5], now_ms(), tonumber(ARGV[4]))
end
return released
