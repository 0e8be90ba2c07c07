-- Adds tasks that have idempotency keys: a key's first task as `add` does, its repeats not at all.
-- KEYS  streams (3), bells, turns, workers, bell queue, load, limits, then each task's record
-- ARGV  the constants of `_add.lua`, stream index from 0, bell message, prefix of result keys, most
--       waiters of a key, msgpack array of {rows, task id, content digest, window in ms, expiry of the
--       record while the task has not ended in ms, key digest} for each task, then each task's frame
-- Returns {rings, one for each task, ...}: as `add`, or {what, original task id, ...} with what
-- 'waits', 'ended' (and the stored reply), 'conflict' or 'crowded'.
-- The same call again changes nothing: a task that its key's record names is added already.
local stream_index, most_waiters = ARGV[2], tonumber(ARGV[5])
local stream = KEYS[tonumber(stream_index) + 1]

-- What a record says to a task, or nil if it stands for nothing that is left in Redis.
local function recall(record, task_id, content)
  local known = redis.call('HMGET', record, 'content', 'task', 'entry', 'ended')
  local original = known[2]
  if not original then
    return nil
  end
  if known[1] ~= content then
    return {'conflict', original}
  end
  if known[4] then
    local reply = redis.call('GET', ARGV[4] .. original)
    return reply and {'ended', original, reply}
  end
  local place, id = string.match(known[3], '^(%d):(.+)$')
  if not redis.call('XRANGE', KEYS[tonumber(place) + 1], id, id)[1] then
    return nil
  end
  if original == task_id then
    return id
  end
  local waiter = 'w:' .. task_id
  if redis.call('HLEN', record) - 4 >= most_waiters and redis.call('HEXISTS', record, waiter) == 0 then
    return {'crowded', original}
  end
  redis.call('HSET', record, waiter, '')
  return {'waits', original}
end

local buckets = open_buckets(KEYS[9])
local held = redis.call('HMGET', KEYS[8], 'rows', 'bytes')
local rows, bytes = tonumber(held[1] or 0), tonumber(held[2] or 0)
local rows_before = rows
local answer = {0}
for index, fact in ipairs(cmsgpack.unpack(ARGV[6])) do
  local record, frame = KEYS[index + 9], ARGV[index + 6]
  local task_rows, task_id, content, window_ms, pending_ms, key = unpack(fact)
  local found = recall(record, task_id, content)
  if not found then
    found = 0
    if rows + task_rows > max_rows or bytes + #frame > max_bytes then
      found = false
    elseif buckets then
      found = take_rows(buckets, task_rows)
    end
    if found == 0 then
      rows = rows + task_rows
      bytes = bytes + #frame
      ensure_group(stream, group)
      found = redis.call('XADD', stream, '*', 'd', frame, 'r', task_rows, 'k', key)
      local ends = string.format('%.0f', now_ms() + window_ms)
      redis.call('HDEL', record, 'ended')
      redis.call('HSET', record, 'content', content, 'task', task_id, 'entry', stream_index .. ':' .. found, 'until', ends)
      redis.call('PEXPIRE', record, string.format('%.0f', pending_ms))
    end
  end
  answer[index + 1] = found
end
if rows > rows_before then
  answer[1] = account(4, rows, bytes, buckets, ARGV[3])
end
return answer
