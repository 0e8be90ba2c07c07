-- Renews the lease of entries that this consumer still owns, and its turn.
-- KEYS  turns, streams    ARGV  group, consumer, turn lease in ms, then stream index, id, ...
-- Returns '<stream index>:<id>' of what is no longer ours: taken by another worker, or answered.
local group, consumer, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
write_at_maxmemory(KEYS[1])
redis.call('ZADD', KEYS[1], now_ms() + lease_ms, consumer)
redis.call('PEXPIRE', KEYS[1], lease_ms * 2)
local lost = {}
for index = 4, #ARGV, 2 do
  local stream, id = KEYS[tonumber(ARGV[index]) + 2], ARGV[index + 1]
  local owned = false
  if redis.call('EXISTS', stream) == 1 then
    ensure_group(stream, group)
    owned = redis.call('XPENDING', stream, group, id, id, 1, consumer)[1]
  end
  if owned then
    redis.call('XCLAIM', stream, group, consumer, 0, id, 'JUSTID')
  else
    lost[#lost + 1] = ARGV[index] .. ':' .. id
  end
end
return lost
