-- Cancels one task: removed at once if no worker holds it, else left for its worker to see.
-- KEYS  stream, cancelled, load
-- ARGV  group, entry id, expiry of the mark in ms, stream index, prefix of records of idempotency keys
-- Returns 1 removed, 0 marked, -1 already answered, -2 untouched since other submits of its key wait.
local stream, group, id = KEYS[1], ARGV[1], ARGV[2]
local found = redis.call('XRANGE', stream, id, id)[1]
if not found then
  return -1
end
local rows, bytes = 1, 0
for field = 1, #found[2], 2 do
  local name, value = found[2][field], found[2][field + 1]
  if name == 'r' then
    rows = tonumber(value)
  elseif name == 'd' then
    bytes = #value
  elseif name == 'k' then
    local record = ARGV[5] .. value
    if redis.call('HGET', record, 'entry') == ARGV[4] .. ':' .. id then
      if redis.call('HLEN', record) > 4 then
        return -2
      end
      redis.call('DEL', record)
    end
  end
end
ensure_group(stream, group)
if redis.call('XPENDING', stream, group, id, id, 1)[1] then
  local now = now_ms()
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[3]), ARGV[4] .. ':' .. id)
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return 0
end
redis.call('XDEL', stream, id)
redis.call('HINCRBY', KEYS[3], 'rows', -rows)
redis.call('HINCRBY', KEYS[3], 'bytes', -bytes)
return 1
