-- Cancels one task: removed at once if no worker holds it, else left for its worker to see.
-- KEYS  stream, cancelled, load, events
-- ARGV  group, entry id, expiry of the mark in ms, stream index, the task's rows, its bytes
-- Returns 1 removed, 0 marked, -1 already answered. Reads no entry: producers may not.
local stream, group, id = KEYS[1], ARGV[1], ARGV[2]
if redis.call('XLEN', stream) == 0 then
  return -1
end
ensure_group(stream, group)
if redis.call('XPENDING', stream, group, id, id, 1)[1] then
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[4] .. ':' .. id)
  return 0
end
if redis.call('XDEL', stream, id) == 0 then
  return -1
end
redis.call('HINCRBY', KEYS[3], 'rows', 0 - tonumber(ARGV[5]))
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - tonumber(ARGV[6]))
redis.call('HINCRBY', KEYS[4], 'cancelled:unclaimed', 1)
return 1
