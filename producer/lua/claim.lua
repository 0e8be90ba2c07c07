-- Claims entries of about `count` rows, at least one, in the order of the streams given, and
-- renews the turn. How many entries that is follows from the mean rows of all that are queued.
-- KEYS  bells, turns, cancelled, load, streams in claim order (their index is their place in KEYS)
-- ARGV  group, consumer, turn lease in ms, count, enter (1: a turn starts, which takes a bell),
--       most bytes to read here
-- Returns {now in ms, {cancelled '<stream index>:<id>'}, {stream index, {entries}}, ...}. Entries of
-- more bytes are left to the caller: a script copies each three times. Then their number stands in
-- place of the entries.
local turns, cancelled = KEYS[2], KEYS[3]
local group, consumer, lease_ms, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
write_at_maxmemory(turns)
if ARGV[5] == '1' then
  redis.call('ZPOPMIN', KEYS[1])
  forget_dead(turns, now)
end
redis.call('ZADD', turns, now + lease_ms, consumer)
redis.call('PEXPIRE', turns, lease_ms * 2)
local answer = {now, {}}
if redis.call('EXISTS', cancelled) == 1 then
  redis.call('ZREMRANGEBYSCORE', cancelled, '-inf', now)
  answer[2] = redis.call('ZRANGE', cancelled, 0, 9999)
end
local entries = 0
for index = 5, #KEYS do
  entries = entries + redis.call('XLEN', KEYS[index])
end
local large = false
if count > 0 and entries > 0 then
  local load = redis.call('HMGET', KEYS[4], 'rows', 'bytes')
  local rows, bytes = tonumber(load[1] or entries), tonumber(load[2] or 0)
  count = math.max(1, math.floor(count / math.max(1, rows / entries)))
  large = math.min(count, entries) * bytes / entries > tonumber(ARGV[6])
end
for index = 5, #KEYS do
  if count <= 0 then
    break
  end
  if large then
    local planned = math.min(count, waiting(KEYS[index], group))
    if planned > 0 then
      count = count - planned
      answer[#answer + 1] = {index - 5, planned}
    end
  elseif redis.call('XLEN', KEYS[index]) > 0 then
    ensure_group(KEYS[index], group)
    local read = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', KEYS[index], '>')
    if read then
      local found = read[1][2]
      count = count - #found
      answer[#answer + 1] = {index - 5, found}
    end
  end
end
return answer
