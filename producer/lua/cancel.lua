-- Cancels one task: removed at once if no worker holds it, else left for its worker to see.
-- KEYS  stream, cancelled, load, events    ARGV  group, entry id, expiry of the mark in ms, stream index
-- Returns 1 removed, 0 marked, -1 already answered.
local stream, group, id = KEYS[1], ARGV[1], ARGV[2]
local found = redis.call('XRANGE', stream, id, id)[1]
if not found then
  return -1
end
ensure_group(stream, group)
if redis.call('XPENDING', stream, group, id, id, 1)[1] then
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[4] .. ':' .. id)
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return 0
end
local rows, bytes = 1, 0
for field = 1, #found[2], 2 do
  if found[2][field] == 'r' then
    rows = tonumber(found[2][field + 1]) or 1
  else
    bytes = #found[2][field + 1]
  end
end
redis.call('XDEL', stream, id)
redis.call('HINCRBY', KEYS[3], 'rows', 0 - rows)
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - bytes)
redis.call('HINCRBY', KEYS[4], 'cancelled:unclaimed', 1)
return 1
