-- Reads dead letters without their frames, one after the other: all of them may be large.
-- KEYS  dead letters    ARGV  first id (or - or + or '(' and an id), count, 1 for the newest first
-- Returns {id, 1 if its frame was kept, fields of it without the frame}, ...
local letters, at, newest = KEYS[1], ARGV[1], ARGV[3] == '1'
local answer = {}
while #answer < tonumber(ARGV[2]) do
  local found
  if newest then
    found = redis.call('XREVRANGE', letters, at, '-', 'COUNT', 1)[1]
  else
    found = redis.call('XRANGE', letters, at, '+', 'COUNT', 1)[1]
  end
  if not found then
    break
  end
  local fields, kept = {}, 0
  for index = 1, #found[2], 2 do
    if found[2][index] == 'd' then
      kept = 1
    else
      fields[#fields + 1] = found[2][index]
      fields[#fields + 1] = found[2][index + 1]
    end
  end
  answer[#answer + 1] = {found[1], kept, fields}
  at = '(' .. found[1]
end
return answer
