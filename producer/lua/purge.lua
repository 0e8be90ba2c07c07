-- Takes up to `count` unclaimed entries out of one stream.
-- KEYS  stream, load, events    ARGV  group, count
-- Returns the frames, for their senders to be told.
local stream, group = KEYS[1], ARGV[1]
local frames, entries, rows, bytes = {}, 0, 0, 0
if redis.call('XLEN', stream) == 0 then
  return frames
end
ensure_group(stream, group)
local read = redis.call('XREADGROUP', 'GROUP', group, 'purge', 'COUNT', ARGV[2], 'STREAMS', stream, '>')
if not read then
  return frames
end
for _, entry in ipairs(read[1][2]) do
  local fields, entry_rows = entry[2], 1
  for field = 1, #fields, 2 do
    if fields[field] == 'r' then
      entry_rows = tonumber(fields[field + 1]) or 1
    elseif fields[field] == 'd' then
      frames[#frames + 1] = fields[field + 1]
      bytes = bytes + #fields[field + 1]
    end
  end
  rows = rows + entry_rows
  entries = entries + 1
  redis.call('XACK', stream, group, entry[1])
  redis.call('XDEL', stream, entry[1])
end
redis.call('XGROUP', 'DELCONSUMER', stream, group, 'purge')
redis.call('HINCRBY', KEYS[2], 'rows', 0 - rows)
redis.call('HINCRBY', KEYS[2], 'bytes', 0 - bytes)
redis.call('HINCRBY', KEYS[3], 'purged:operator', entries)
return frames
