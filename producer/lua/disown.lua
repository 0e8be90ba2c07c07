-- Hands back what Redis delivered to a consumer that never heard of it: the answers were lost.
-- KEYS  bells, bell queue, streams
-- ARGV  group, consumer, idle in ms, bell ttl in ms, bell message, then '<stream index>:<id>' of what it knows
-- Returns the ids of what was handed back, their deliveries uncounted; more than none rings.
local group, consumer = ARGV[1], ARGV[2]
local known, disowned = {}, {}
for index = 6, #ARGV do
  known[ARGV[index]] = true
end
for index = 3, #KEYS do
  local stream = KEYS[index]
  if redis.call('XLEN', stream) > 0 then
    ensure_group(stream, group)
    local start = '-'
    while start do
      local pending = redis.call('XPENDING', stream, group, start, '+', 256, consumer)
      for _, entry in ipairs(pending) do
        local id, deliveries = entry[1], entry[4]
        if not known[(index - 3) .. ':' .. id] then
          redis.call('XCLAIM', stream, group, 'released', 0, id, 'IDLE', ARGV[3], 'RETRYCOUNT', math.max(0, deliveries - 1), 'JUSTID')
          disowned[#disowned + 1] = id
        end
      end
      start = #pending == 256 and '(' .. pending[256][1]
    end
  end
end
if #disowned > 0 then
  ring(KEYS[1], KEYS[2], ARGV[5], now_ms(), tonumber(ARGV[4]))
end
return disowned
