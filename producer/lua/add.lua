-- Adds a flush of tasks of one model and priority; each is accepted or refused alone.
-- KEYS  stream, bells, turns, workers, load, seen, bell queue
-- ARGV  group, flush number, seen expiry in s, bell ttl in ms, cover rows, max rows, max bytes,
--       bell message, msgpack array of each task's rows, then each task's frame
-- Returns {rings, id or false, ...}. A flush that was taken before returns the same again.
local stream, bells, turns, workers, load, seen = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local group, flush = ARGV[1], ARGV[2]
local before = redis.call('GET', seen)
if before then
  local number, answer = cmsgpack.unpack(before)
  if number == flush then
    answer[1] = 0
    return answer
  end
end
ensure_group(stream, group)
local max_rows, max_bytes = tonumber(ARGV[6]), tonumber(ARGV[7])
local held = redis.call('HMGET', load, 'rows', 'bytes')
local rows, bytes = tonumber(held[1] or 0), tonumber(held[2] or 0)
local added_rows, added_bytes = 0, 0
local answer = {0}
for index, task_rows in ipairs(cmsgpack.unpack(ARGV[9])) do
  local frame = ARGV[index + 9]
  if rows + added_rows + task_rows > max_rows or bytes + added_bytes + #frame > max_bytes then
    answer[#answer + 1] = false
  else
    if task_rows == 1 then
      answer[#answer + 1] = redis.call('XADD', stream, '*', 'd', frame)
    else
      answer[#answer + 1] = redis.call('XADD', stream, '*', 'd', frame, 'r', task_rows)
    end
    added_rows = added_rows + task_rows
    added_bytes = added_bytes + #frame
  end
end
if added_rows > 0 then
  redis.call('HINCRBY', load, 'rows', added_rows)
  redis.call('HINCRBY', load, 'bytes', added_bytes)
  local now = now_ms()
  local covered = covers(bells, turns, now)
  local needed = 0
  if covered == 0 then
    needed = 1
  elseif rows + added_rows > covered * tonumber(ARGV[5]) then
    needed = math.min(1, alive(workers, now) - covered)
  end
  if needed > 0 then
    ring(bells, KEYS[7], ARGV[8], now, tonumber(ARGV[4]))
    answer[1] = 1
  end
end
-- GETSET and GETEX work on strings only. A producer that had SET or EXPIRE could end any key it may name.
redis.call('GETSET', seen, cmsgpack.pack(flush, answer))
redis.call('GETEX', seen, 'EX', ARGV[3])
return answer
