-- Adds a flush of tasks of one model and priority; each is accepted or refused alone.
-- KEYS  stream, seen, then the keys of `_add.lua`: bells, turns, workers, bell queue, load, limits,
--       bucket, client's bucket
-- ARGV  group, flush number, seen expiry in s, bell ttl in ms, cover rows, max rows, max bytes,
--       bell message, msgpack array of each task's rows, then each task's frame
-- Returns {rings, one for each task, ...}: its id, false if the queue is full, or the ms after which
-- a rate limit may let it in. A flush that was taken before returns the same again.
local stream, seen = KEYS[1], KEYS[2]
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
local queue = open_queue(3, tonumber(ARGV[6]), tonumber(ARGV[7]))
local answer = {0}
for index, rows in ipairs(cmsgpack.unpack(ARGV[9])) do
  local frame = ARGV[index + 9]
  local refused = admit(queue, rows, #frame)
  if refused ~= 0 then
    answer[#answer + 1] = refused
  elseif rows == 1 then
    answer[#answer + 1] = redis.call('XADD', stream, '*', 'd', frame)
  else
    answer[#answer + 1] = redis.call('XADD', stream, '*', 'd', frame, 'r', rows)
  end
end
answer[1] = close_queue(queue, tonumber(ARGV[5]), ARGV[8], tonumber(ARGV[4]))
redis.call('SET', seen, cmsgpack.pack(flush, answer), 'EX', ARGV[3])
return answer
