-- Adds tasks that have idempotency keys: a key's first task as `add` does, its repeats not at all.
-- KEYS  streams (3), bells, turns, workers, bell queue, load, limits, cancelled, then each task's record
-- ARGV  the constants of `_add.lua`, stream index from 0, bell message, prefix of result keys, most
--       waiters of a key, msgpack array of {rows, task id, content digest, window in ms, expiry of the
--       record while the task has not ended in ms, key} for each task, then each task's frame
-- Returns {rings, one for each task, ...}: as `add`, or {what, original task id, ...} with what
-- 'waits', 'ended' (and the stored reply), 'conflict' or 'crowded'.
-- The same call again changes nothing: a task that its key's record names is added already.
local stream_index, most_waiters = ARGV[2], tonumber(ARGV[5])
local stream = KEYS[tonumber(stream_index) + 1]

local function parts_of(id)
  local ms, number = string.match(id, '^(%d+)%-(%d+)$')
  return tonumber(ms), tonumber(number)
end

local function is_after(id, other)
  local ms, number = parts_of(id)
  local other_ms, other_number = parts_of(other)
  return ms > other_ms or (ms == other_ms and number > other_number)
end

-- True while a worker holds the entry, or it lies behind the last one that was claimed. Producers may not
-- read entries; one that was deleted unclaimed counts as gone once nothing waits or a later one is claimed.
local function is_open(entry)
  local place, id = string.match(entry, '^([012]):(%d+%-%d+)$')
  local own = place and KEYS[tonumber(place) + 1]
  if not own or redis.call('XLEN', own) == 0 then
    return false
  end
  ensure_group(own, group)
  if redis.call('XPENDING', own, group, id, id, 1)[1] then
    return true
  end
  if waiting(own, group) > 0 then
    for _, facts in ipairs(redis.call('XINFO', 'GROUPS', own)) do
      local found = {}
      for field = 1, #facts, 2 do
        found[facts[field]] = facts[field + 1]
      end
      if found.name == group then
        return is_after(id, found['last-delivered-id'])
      end
    end
  end
  return false
end

-- What a record says to a task, or nil if it stands for nothing that is left in Redis. The second value
-- are those who wait for what is lost; the next task of the key tells them.
local function recall(key, task_id, content)
  local record = read_record(key)
  if not record then
    return nil, {}
  end
  if record.content ~= content then
    return {'conflict', record.task}
  end
  if record.entry == '' then
    local reply = redis.call('GET', ARGV[4] .. record.task)
    if reply then
      return {'ended', record.task, reply}
    end
    return nil, {}
  end
  if not is_open(record.entry) then
    return nil, record.waiters
  end
  if record.task == task_id then
    return string.match(record.entry, ':(.+)$')
  end
  for _, waiter in ipairs(record.waiters) do
    if waiter == task_id then
      return {'waits', record.task}
    end
  end
  if #record.waiters >= most_waiters then
    return {'crowded', record.task}
  end
  table.insert(record.waiters, task_id)
  -- A worker may hold it and not have seen yet that its sender took it back: it is wanted again.
  redis.call('ZADD', KEYS[10], 'XX', 0, record.entry)
  write_record(key, record)
  return {'waits', record.task}
end

local buckets = open_buckets(KEYS[9])
local held = redis.call('HMGET', KEYS[8], 'rows', 'bytes')
local rows, bytes = tonumber(held[1] or 0), tonumber(held[2] or 0)
local rows_before, bytes_before = rows, bytes
local answer = {0}
for index, fact in ipairs(cmsgpack.unpack(ARGV[6])) do
  local record, frame = KEYS[index + 10], ARGV[index + 6]
  local task_rows, task_id, content, window_ms, pending_ms, key = unpack(fact)
  local found, waiters = recall(record, task_id, content)
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
      local now = now_ms()
      write_record(record, {
        content = content, task = task_id, entry = stream_index .. ':' .. found,
        until_ms = now + window_ms, expires_ms = now + pending_ms, waiters = waiters,
      })
    end
  end
  answer[index + 1] = found
end
if rows > rows_before then
  answer[1] = account(4, rows, rows - rows_before, bytes - bytes_before, buckets, ARGV[3])
end
return answer
