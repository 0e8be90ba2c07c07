-- Idempotency keys. A record is a hash: `content` (digest of what was submitted under the key), `task`,
-- `entry` ('<stream index>:<id>'), `until` (end of the window in ms), `ended` once its outcome is stored,
-- and a field 'w:<task id>' for each submit that waits for the outcome under a task id of its own.

-- The keyed task of `entry` ends: those who wait are told to fetch its stored outcome. With `holds` the
-- record stands for that outcome until its window ends, else the key is free again.
local function end_key(record, entry, holds, reply_prefix, reply_ttl_s)
  local fields = redis.call('HGETALL', record)
  local known, waiters = {}, {}
  for index = 1, #fields, 2 do
    local waiter = string.match(fields[index], '^w:(.+)$')
    if waiter then
      waiters[#waiters + 1] = waiter
    else
      known[fields[index]] = fields[index + 1]
    end
  end
  if known.entry ~= entry then
    return
  end
  redis.call('DEL', record)
  if holds then
    redis.call('HSET', record, 'content', known.content, 'task', known.task, 'until', known['until'], 'ended', '1')
    redis.call('PEXPIREAT', record, known['until'])
  end
  for _, waiter in ipairs(waiters) do
    local stream = reply_prefix .. string.match(waiter, '^(.*)%-')
    redis.call('XADD', stream, '*', 'd', '', 'task', known.task, 'waiter', waiter)
    if redis.call('XLEN', stream) == 1 then
      redis.call('EXPIRE', stream, reply_ttl_s)
    end
  end
end
