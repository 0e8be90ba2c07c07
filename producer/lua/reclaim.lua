-- Takes over entries whose lease ran out (their worker died) or that were handed back.
-- KEYS  holders, events, streams
-- ARGV  group, consumer, lease in ms, count, suspect deliveries, want suspects (0 or 1)
-- An entry delivered `suspect deliveries` times or more is a suspect: those are taken one at a
-- time and only when asked for, so that a task that kills its worker takes no neighbour with it.
-- `holders` keeps, by '<stream index>:<id>', whose lease of an entry has run out.
-- Returns {1 if suspects wait that were not asked for, {{stream index, deliveries so far, {id, fields}, 1 if handed back, {holders}}, ...},
-- {'<stream index>:<id>' of each entry that is gone from its stream}}
local group, consumer, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local count, limit, want_suspects = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6] == '1'
local MOST_HOLDERS, HOLDERS_S = 16, 86400

local function holders_with(owner, member)
  local known = redis.call('HGET', KEYS[1], member)
  local found = known and cmsgpack.unpack(known) or {}
  if owner ~= 'released' then
    found[#found + 1] = owner
    if #found > MOST_HOLDERS then
      table.remove(found, 1)
    end
    redis.call('HSET', KEYS[1], member, cmsgpack.pack(found))
    redis.call('EXPIRE', KEYS[1], HOLDERS_S)
  end
  return found
end

local answer, gone, suspects_wait = {}, {}, 0
for index = 3, #KEYS do
  local stream, place = KEYS[index], index - 3
  if redis.call('XLEN', stream) > 0 then
    ensure_group(stream, group)
    local start = '-'
    while #answer < count do
      local pending = redis.call('XPENDING', stream, group, 'IDLE', lease_ms, start, '+', 256)
      for _, entry in ipairs(pending) do
        local id, owner, deliveries = entry[1], entry[2], entry[4]
        local suspect = deliveries >= limit
        if suspect and not want_suspects then
          suspects_wait = 1
        elseif #answer < count and suspect == want_suspects then
          local taken = redis.call('XCLAIM', stream, group, consumer, lease_ms, id)
          if taken[1] and taken[1][2] then
            local found = holders_with(owner, place .. ':' .. id)
            answer[#answer + 1] = {place, deliveries, taken[1], owner == 'released' and 1 or 0, found}
          else
            redis.call('XACK', stream, group, id)
            redis.call('HDEL', KEYS[1], place .. ':' .. id)
            redis.call('HINCRBY', KEYS[2], 'vanished:deleted', 1)
            gone[#gone + 1] = place .. ':' .. id
          end
          if want_suspects then
            return {0, answer, gone}
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
return {suspects_wait, answer, gone}
