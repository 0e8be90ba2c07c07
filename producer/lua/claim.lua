-- Claims up to `count` entries in the order of the streams given, and renews the turn.
-- KEYS  bells, turns, cancelled, streams in claim order (their index is their place in KEYS)
-- ARGV  group, consumer, turn lease in ms, count, enter (1: a turn starts, which takes a bell)
-- Returns {now in ms, {cancelled '<stream index>:<id>'}, {stream index, {entries}}, ...}
local turns, cancelled = KEYS[2], KEYS[3]
local group, consumer, lease_ms, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
if ARGV[5] == '1' then
  redis.call('ZPOPMIN', KEYS[1])
  redis.call('ZREMRANGEBYSCORE', turns, '-inf', now)
end
redis.call('ZADD', turns, now + lease_ms, consumer)
redis.call('PEXPIRE', turns, lease_ms * 2)
local answer = {now, {}}
if redis.call('EXISTS', cancelled) == 1 then
  answer[2] = redis.call('ZRANGE', cancelled, 0, 9999)
end
for index = 4, #KEYS do
  if count <= 0 then
    break
  end
  if redis.call('XLEN', KEYS[index]) > 0 then
    ensure_group(KEYS[index], group)
    local read = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', KEYS[index], '>')
    if read then
      local entries = read[1][2]
      count = count - #entries
      answer[#answer + 1] = {index - 4, entries}
    end
  end
end
return answer
