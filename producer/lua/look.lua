-- The state of one model's queue; with `heal`, rings for work that nobody covers.
-- KEYS  bells, turns, workers, load, dead letters, bell queue, streams
-- ARGV  group, bell ttl in ms, lease in ms, heal (0 or 1), bell message
-- Returns {rings, now, bells, turns, workers, rows, bytes, dead, per stream: length, held, oldest id}
-- Held are entries that were claimed and not handed back.
local bells, turns, workers = KEYS[1], KEYS[2], KEYS[3]
local now = now_ms()
local load = redis.call('HMGET', KEYS[4], 'rows', 'bytes')
local answer = {
  0, now,
  alive(bells, now), alive(turns, now),
  alive(workers, now),
  tonumber(load[1] or 0), tonumber(load[2] or 0), redis.call('XLEN', KEYS[5]),
}
local uncovered = false
for index = 7, #KEYS do
  local length, held, oldest = redis.call('XLEN', KEYS[index]), 0, ''
  if length > 0 then
    ensure_group(KEYS[index], ARGV[1])
    local pending = redis.call('XPENDING', KEYS[index], ARGV[1])
    local claimed = pending[1]
    held = claimed
    for _, consumer in ipairs(pending[4] or {}) do
      if consumer[1] == 'released' then
        held = held - tonumber(consumer[2])
      end
    end
    oldest = redis.call('XRANGE', KEYS[index], '-', '+', 'COUNT', 1)[1][1]
    if length > claimed or redis.call('XPENDING', KEYS[index], ARGV[1], 'IDLE', ARGV[3], '-', '+', 1)[1] then
      uncovered = true
    end
  end
  answer[#answer + 1] = length
  answer[#answer + 1] = held
  answer[#answer + 1] = oldest
end
if ARGV[4] == '1' and uncovered and answer[3] + answer[4] == 0 then
  ring(bells, KEYS[6], ARGV[5], now, tonumber(ARGV[2]))
  answer[1] = 1
end
return answer
