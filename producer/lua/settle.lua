-- Answers, acknowledges and deletes in one step. Whoever acknowledges an entry first answers it;
-- a later answer to the same entry (from a worker that lost its lease) is dropped.
-- KEYS  load, cancelled, dead letters, their bytes, holders, streams (3), reply lists, then result keys
--       and records of idempotency keys
-- ARGV  group, reply expiry in s, msgpack {most dead letters, their most bytes, their expiry in s},
--       msgpack array of five facts per entry: stream index, id, reply list index or -1, rows,
--       bytes; msgpack array of {entry number from 0, its result key's place in KEYS or 0, store in s,
--       fields of a dead letter or '', the place in KEYS of its idempotency key's record or 0, 1 if that
--       holds the outcome, prefix of reply lists} for those that are kept; then each entry's reply frame
-- Returns {answered, {entry number of each dropped answer}, {{task id, code, reason} of each old
-- dead letter that went}}
local load, cancelled, letters, holders = KEYS[1], KEYS[2], KEYS[3], KEYS[5]
local group = ARGV[1]
local facts, kept = cmsgpack.unpack(ARGV[4]), {}
for _, one in ipairs(cmsgpack.unpack(ARGV[5])) do
  kept[one[1]] = one
end
local frames, answered, dropped, old_letters, rows, bytes = {}, 0, {}, {}, 0, 0
local ids = {{}, {}, {}}
local marks = redis.call('EXISTS', cancelled, holders) > 0
for number = 0, #facts / 5 - 1 do
  local first = number * 5
  local stream_index, id, reply_index = facts[first + 1] + 1, facts[first + 2], facts[first + 3]
  local reply = ARGV[6 + number]
  if redis.call('XACK', KEYS[5 + stream_index], group, id) == 1 then
    answered = answered + 1
    local deleted = ids[stream_index]
    deleted[#deleted + 1] = id
    if marks then
      redis.call('ZREM', cancelled, facts[first + 1] .. ':' .. id)
      redis.call('HDEL', holders, facts[first + 1] .. ':' .. id)
    end
    rows = rows + facts[first + 4]
    bytes = bytes + facts[first + 5]
    if reply_index >= 0 then
      local joined = frames[reply_index]
      if not joined then
        joined = {}
        frames[reply_index] = joined
      end
      joined[#joined + 1] = reply
    end
    local keep = kept[number]
    if keep and keep[2] > 0 then
      redis.call('SET', KEYS[keep[2]], reply, 'EX', keep[3])
    end
    if keep and keep[4] ~= '' then
      local limits = cmsgpack.unpack(ARGV[3])
      local entry = redis.call('XRANGE', KEYS[5 + stream_index], id, id)[1]
      local frame = entry and field_of(entry[2], 'd')
      keep_letter(letters, KEYS[4], keep[4], frame, limits[1], limits[2], limits[3], old_letters)
    end
    if keep and keep[5] > 0 then
      end_key(KEYS[keep[5]], facts[first + 1] .. ':' .. id, keep[6] == 1, keep[7], ARGV[2])
    end
  else
    dropped[#dropped + 1] = number
  end
end
for stream_index, deleted in ipairs(ids) do
  for first = 1, #deleted, 1000 do
    redis.call('XDEL', KEYS[5 + stream_index], unpack(deleted, first, math.min(first + 999, #deleted)))
  end
end
for reply_index, joined in pairs(frames) do
  local key, reply = KEYS[9 + reply_index], table.concat(joined)
  local pushed = redis.pcall('RPUSH', key, reply)
  if type(pushed) == 'table' and pushed.err then
    -- Its client made it something else; that must not cost others their answers.
    redis.call('DEL', key)
    redis.call('RPUSH', key, reply)
  end
  redis.call('EXPIRE', key, ARGV[2])
end
if answered > 0 then
  local left = redis.call('HINCRBY', load, 'rows', 0 - rows)
  redis.call('HINCRBY', load, 'bytes', 0 - bytes)
  if left <= 0 and redis.call('XLEN', KEYS[6]) + redis.call('XLEN', KEYS[7]) + redis.call('XLEN', KEYS[8]) == 0 then
    redis.call('DEL', load)
  end
end
return {answered, dropped, old_letters}
