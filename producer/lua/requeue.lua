-- Moves a dead letter back into the queue, as the new task in `frame`.
-- KEYS  dead letters, their bytes, stream, bells, turns, load, bell queue, events
-- ARGV  group, letter's id, rows, most rows and most bytes of the queue, bell ttl in ms,
--       bell message, frame
-- Returns the new entry's id, or 'gone' if there is no such letter, or 'full'.
local letters, stream, load = KEYS[1], KEYS[3], KEYS[6]
local rows, frame = tonumber(ARGV[3]), ARGV[8]
if not redis.call('XRANGE', letters, ARGV[2], ARGV[2])[1] then
  return 'gone'
end
local held = redis.call('HMGET', load, 'rows', 'bytes')
if tonumber(held[1] or 0) + rows > tonumber(ARGV[4]) or tonumber(held[2] or 0) + #frame > tonumber(ARGV[5]) then
  return 'full'
end
-- First, since it frees memory: then Redis runs the rest at `maxmemory` too.
take_letter(letters, KEYS[2], ARGV[2])
ensure_group(stream, ARGV[1])
local id
if rows == 1 then
  id = redis.call('XADD', stream, '*', 'd', frame)
else
  id = redis.call('XADD', stream, '*', 'd', frame, 'r', rows)
end
redis.call('HINCRBY', load, 'rows', rows)
redis.call('HINCRBY', load, 'bytes', #frame)
redis.call('HINCRBY', KEYS[8], 'requeued:operator', 1)
local now = now_ms()
if covers(KEYS[4], KEYS[5], now) == 0 then
  ring(KEYS[4], KEYS[7], ARGV[7], now, tonumber(ARGV[6]))
end
return id
