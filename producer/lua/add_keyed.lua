-- Adds tasks that have idempotency keys: a key's first task as `add` does, its repeats not at all.
-- KEYS  streams (3), then the keys of `_add.lua`, then each task's record
-- ARGV  group, stream index from 0, bell ttl in ms, cover rows, max rows, max bytes, bell message,
--       prefix of result keys, most waiters of a key, msgpack array of {rows, task id, content digest,
--       window in ms, expiry of the record while the task has not ended in ms, key digest} for each
--       task, then each task's frame
-- Returns {rings, one for each task, ...}: as `add`, or {what, original task id, ...} with what
-- 'waits', 'ended' (and the stored reply), 'conflict' or 'crowded'.
-- The same call again changes nothing: a task that its key's record names is added already.
local group, stream_index, most_waiters = ARGV[1], ARGV[2], tonumber(ARGV[9])
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
    local reply = redis.call('GET', ARGV[8] .. original)
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

local queue = open_queue(4, tonumber(ARGV[5]), tonumber(ARGV[6]))
local answer = {0}
for index, fact in ipairs(cmsgpack.unpack(ARGV[10])) do
  local record, frame = KEYS[index + 11], ARGV[index + 10]
  local rows, task_id, content, window_ms, pending_ms, key = unpack(fact)
  local found = recall(record, task_id, content)
  if not found then
    found = admit(queue, rows, #frame)
    if found == 0 then
      ensure_group(stream, group)
      found = redis.call('XADD', stream, '*', 'd', frame, 'r', rows, 'k', key)
      local ends = string.format('%.0f', now_ms() + window_ms)
      redis.call('HDEL', record, 'ended')
      redis.call('HSET', record, 'content', content, 'task', task_id, 'entry', stream_index .. ':' .. found, 'until', ends)
      redis.call('PEXPIRE', record, string.format('%.0f', pending_ms))
    end
  end
  answer[index + 1] = found
end
answer[1] = close_queue(queue, tonumber(ARGV[4]), ARGV[7], tonumber(ARGV[3]))
return answer
