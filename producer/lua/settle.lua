-- Answers, acknowledges and deletes in one step. Whoever acknowledges an entry first answers it;
-- a later answer to the same entry (from a worker that lost its lease) is dropped.
-- KEYS  load, cancelled, dead, streams (3), reply streams
-- ARGV  group, reply expiry in s, dead list limit,
--       then per entry: stream index, id, reply stream index or -1, rows, bytes, reply frame,
--       result key or '', store in s, dead record or ''
-- Returns {answered, dropped}
local load, cancelled, dead = KEYS[1], KEYS[2], KEYS[3]
local group = ARGV[1]
local frames, answered, dropped, rows, bytes = {}, 0, 0, 0, 0
local ids = {{}, {}, {}}
local marks = redis.call('EXISTS', cancelled) == 1
for index = 4, #ARGV, 9 do
  local stream_index, id = tonumber(ARGV[index]) + 1, ARGV[index + 1]
  local stream = KEYS[3 + stream_index]
  if redis.call('XACK', stream, group, id) == 1 then
    answered = answered + 1
    local deleted = ids[stream_index]
    deleted[#deleted + 1] = id
    if marks then
      redis.call('ZREM', cancelled, ARGV[index] .. ':' .. id)
    end
    rows = rows + tonumber(ARGV[index + 3])
    bytes = bytes + tonumber(ARGV[index + 4])
    local reply_index = tonumber(ARGV[index + 2])
    if reply_index >= 0 then
      local joined = frames[reply_index]
      if not joined then
        joined = {}
        frames[reply_index] = joined
      end
      joined[#joined + 1] = ARGV[index + 5]
    end
    if ARGV[index + 6] ~= '' then
      redis.call('SET', ARGV[index + 6], ARGV[index + 5], 'EX', ARGV[index + 7])
    end
    if ARGV[index + 8] ~= '' then
      redis.call('LPUSH', dead, ARGV[index + 8])
      redis.call('LTRIM', dead, 0, tonumber(ARGV[3]) - 1)
    end
  else
    dropped = dropped + 1
  end
end
for stream_index, deleted in ipairs(ids) do
  for first = 1, #deleted, 1000 do
    redis.call('XDEL', KEYS[3 + stream_index], unpack(deleted, first, math.min(first + 999, #deleted)))
  end
end
for reply_index, joined in pairs(frames) do
  local key = KEYS[7 + reply_index]
  redis.call('XADD', key, '*', 'd', table.concat(joined))
  -- The reader renews the expiry of a stream that it knows; a new one has none yet.
  if redis.call('XLEN', key) == 1 then
    redis.call('EXPIRE', key, ARGV[2])
  end
end
if answered > 0 then
  local left = redis.call('HINCRBY', load, 'rows', -rows)
  redis.call('HINCRBY', load, 'bytes', -bytes)
  if left <= 0 and redis.call('XLEN', KEYS[4]) + redis.call('XLEN', KEYS[5]) + redis.call('XLEN', KEYS[6]) == 0 then
    redis.call('DEL', load)
  end
end
return {answered, dropped}
