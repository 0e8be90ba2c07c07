-- Adds a flush of tasks of one model and priority; each is accepted or refused alone.
-- KEYS  stream, seen, bells, turns, workers, bell queue, load, limits
-- ARGV  the constants of `_add.lua`, flush number, bell message, msgpack array of each task's rows,
--       then each task's frame
-- Returns {rings, one for each task, ...}: its id, false if the queue is full, or the ms after which
-- a rate limit may let it in. A flush that was taken before returns the same again.
local stream, seen, flush = KEYS[1], KEYS[2], ARGV[2]
local before = redis.call('GET', seen)
if before then
  local number, answer = cmsgpack.unpack(before)
  if number == flush then
    answer[1] = 0
    return answer
  end
end
ensure_group(stream, group)
local buckets = open_buckets(KEYS[8])
local held = redis.call('HMGET', KEYS[7], 'rows', 'bytes')
local rows, bytes = tonumber(held[1] or 0), tonumber(held[2] or 0)
local rows_before, bytes_before = rows, bytes
local answer = {0}
for index, task_rows in ipairs(cmsgpack.unpack(ARGV[4])) do
  local frame = ARGV[index + 4]
  local wait_ms = 0
  if rows + task_rows > max_rows or bytes + #frame > max_bytes then
    wait_ms = false
  elseif buckets then
    wait_ms = take_rows(buckets, task_rows)
  end
  if wait_ms ~= 0 then
    answer[#answer + 1] = wait_ms
  else
    if task_rows == 1 then
      answer[#answer + 1] = redis.call('XADD', stream, '*', 'd', frame)
    else
      answer[#answer + 1] = redis.call('XADD', stream, '*', 'd', frame, 'r', task_rows)
    end
    rows = rows + task_rows
    bytes = bytes + #frame
  end
end
if rows > rows_before then
  answer[1] = account(3, rows, rows - rows_before, bytes - bytes_before, buckets, ARGV[3])
end
-- GETSET and GETEX work on strings only. A producer that had SET or EXPIRE could end any key it may name.
redis.call('GETSET', seen, cmsgpack.pack(flush, answer))
redis.call('GETEX', seen, 'EX', seen_s)
return answer
