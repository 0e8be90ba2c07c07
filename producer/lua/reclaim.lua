-- Takes over entries whose lease ran out (their worker died) or that were handed back.
-- KEYS  streams
-- ARGV  group, consumer, lease in ms, count, suspect deliveries, want suspects (0 or 1)
-- An entry delivered `suspect deliveries` times or more is a suspect: those are taken one at a
-- time and only when asked for, so that a task that kills its worker takes no neighbour with it.
-- Returns {1 if suspects wait that were not asked for, {stream index, deliveries so far, {id, fields}}, ...}
local group, consumer, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local count, limit, want_suspects = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local answer = {0}
for index, stream in ipairs(KEYS) do
  if redis.call('XLEN', stream) > 0 then
    ensure_group(stream, group)
    local start = '-'
    while #answer <= count do
      local pending = redis.call('XPENDING', stream, group, 'IDLE', lease_ms, start, '+', 256)
      for _, entry in ipairs(pending) do
        local id, deliveries = entry[1], entry[4]
        local suspect = deliveries >= limit
        if suspect and not want_suspects then
          answer[1] = 1
        elseif #answer <= count and suspect == want_suspects then
          local taken = redis.call('XCLAIM', stream, group, consumer, lease_ms, id)
          if taken[1] and taken[1][2] then
            answer[#answer + 1] = {index - 1, deliveries, taken[1]}
          else
            redis.call('XACK', stream, group, id)
          end
          if want_suspects then
            return answer
          end
        end
      end
      if #pending < 256 then
        break
      end
      start = '(' .. pending[#pending][1]
    end
  end
end
return answer
