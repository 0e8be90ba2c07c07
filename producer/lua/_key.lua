-- Idempotency keys. A record is a msgpack map: `content` (digest of what was submitted under the key),
-- `task`, `entry` ('<stream index>:<id>', or '' once the outcome is stored), `until_ms` (end of the
-- window), `expires_ms` (end of the record) and `waiters`, the task ids of other submits that wait for the
-- outcome. It is a string, since producers may not expire or delete other keys (docs/security.md).
local function is_time(value)
  return type(value) == 'number' and value > 0 and value < 2 ^ 53
end

-- nil for what is none: producers write records.
local function read_record(key)
  local read, record = pcall(cmsgpack.unpack, redis.call('GET', key) or '')
  if read and type(record) == 'table' and type(record.task) == 'string' and type(record.entry) == 'string'
    and type(record.waiters) == 'table' and is_time(record.until_ms) and is_time(record.expires_ms) then
    return record
  end
  return nil
end

local function write_record(key, record)
  redis.call('GETSET', key, cmsgpack.pack(record))
  redis.call('GETEX', key, 'PXAT', string.format('%.0f', record.expires_ms))
end

-- A time that is over makes Redis delete the key.
local function free_record(key)
  redis.call('GETEX', key, 'PXAT', 1)
end

-- The keyed task of `entry` ends: those who wait are told to fetch its stored outcome. With `holds` the
-- record stands for that outcome until its window ends, else the key is free again.
local function end_key(key, entry, holds, reply_prefix, reply_ttl_s)
  -- Whatever producers wrote there, answers are given.
  local read, record = pcall(read_record, key)
  if not read or not record or record.entry ~= entry then
    return
  end
  local waiters = record.waiters
  if holds then
    record.entry, record.waiters, record.expires_ms = '', {}, record.until_ms
    write_record(key, record)
  else
    free_record(key)
  end
  -- Records of a client name tell clients of that name only.
  local owner = string.match(key, '([^:]*):[^:]*$') .. '.'
  for _, waiter in ipairs(waiters) do
    local client = type(waiter) == 'string' and string.match(waiter, '^(.*)%-')
    if client and string.sub(client, 1, #owner) == owner then
      -- A reply of status 3, see producer/wire.py.
      local list, notice = reply_prefix .. client, cmsgpack.pack({1, waiter, 3, record.task})
      if type(redis.pcall('RPUSH', list, notice)) == 'number' then
        redis.call('EXPIRE', list, reply_ttl_s)
      end
    end
  end
end
