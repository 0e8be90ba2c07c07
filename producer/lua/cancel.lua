-- Cancels one task: removed at once if no worker holds it, else left for its worker to see.
-- KEYS  stream, cancelled, load, events, record of its idempotency key if it has one
-- ARGV  group, entry id, expiry of the mark in ms, stream index, the task's rows, its bytes
-- Returns 1 removed, 0 marked, -1 already answered, -2 untouched since other submits of its key wait.
-- Reads no entry: producers may not.
local stream, group, id = KEYS[1], ARGV[1], ARGV[2]
if redis.call('XLEN', stream) == 0 then
  return -1
end
local record = KEYS[5] and read_record(KEYS[5])
if record and record.entry ~= ARGV[4] .. ':' .. id then
  record = nil
end
if record and #record.waiters > 0 then
  return -2
end
ensure_group(stream, group)
local held = redis.call('XPENDING', stream, group, id, id, 1)[1]
if held then
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[4] .. ':' .. id)
elseif redis.call('XDEL', stream, id) == 0 then
  return -1
end
if held then
  -- Its key stands until the worker ends it: it may be running.
  return 0
end
if record then
  free_record(KEYS[5])
end
redis.call('HINCRBY', KEYS[3], 'rows', 0 - tonumber(ARGV[5]))
redis.call('HINCRBY', KEYS[3], 'bytes', 0 - tonumber(ARGV[6]))
redis.call('HINCRBY', KEYS[4], 'cancelled:unclaimed', 1)
return 1
