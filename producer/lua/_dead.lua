-- Dead letters: a stream bounded in entries and in bytes, and the count of those bytes beside it.
local function bytes_of_fields(fields)
  local bytes = 0
  for index = 1, #fields do
    bytes = bytes + #fields[index]
  end
  return bytes
end

-- Removes one letter; returns its fields, or nil if there is none of that id.
local function take_letter(letters, bytes, id)
  local found = redis.call('XRANGE', letters, id, id)[1]
  if not found then
    return nil
  end
  redis.call('XDEL', letters, id)
  if redis.call('XLEN', letters) == 0 then
    redis.call('DEL', letters, bytes)
  else
    redis.call('DECRBY', bytes, bytes_of_fields(found[2]))
  end
  return found[2]
end

local function field_of(fields, name)
  for index = 1, #fields, 2 do
    if fields[index] == name then
      return fields[index + 1]
    end
  end
  return false
end

-- Keeps a letter and drops the oldest ones for it. A frame too large to be kept at all is left out.
-- Adds {task id (or the letter's), code, 'count' or 'bytes'} of each dropped letter to `dropped`.
local function keep_letter(letters, bytes, fields, frame, max_letters, max_bytes, ttl_s, dropped)
  if frame and bytes_of_fields(fields) + #frame <= max_bytes then
    fields[#fields + 1] = 'd'
    fields[#fields + 1] = frame
  end
  local added = bytes_of_fields(fields)
  while true do
    local held = redis.call('XLEN', letters)
    if held == 0 then
      redis.call('DEL', bytes)
      break
    end
    local reason
    if held >= max_letters then
      reason = 'count'
    elseif tonumber(redis.call('GET', bytes) or 0) + added > max_bytes then
      reason = 'bytes'
    else
      break
    end
    local oldest = redis.call('XRANGE', letters, '-', '+', 'COUNT', 1)[1][1]
    local gone = take_letter(letters, bytes, oldest)
    local name = field_of(gone, 'task')
    if not name or name == '' then
      name = 'letter:' .. oldest
    end
    dropped[#dropped + 1] = {name, field_of(gone, 'code') or '', reason}
  end
  redis.call('XADD', letters, '*', unpack(fields))
  redis.call('INCRBY', bytes, added)
  -- The same moment for both: they are worth nothing without each other.
  local expires_s = tonumber(redis.call('TIME')[1]) + ttl_s
  redis.call('EXPIREAT', letters, expires_s)
  redis.call('EXPIREAT', bytes, expires_s)
end
