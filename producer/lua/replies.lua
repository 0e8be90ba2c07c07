-- Removes the replies that their client has read and returns the next ones, which stay. A call that Redis
-- runs late, after the connection broke and the client asked again, finds another first reply and
-- removes nothing.
-- KEYS  reply list
-- ARGV  how the first reply that was read begins, how many were read, how many to return
local first = tonumber(ARGV[2]) > 0 and redis.call('LINDEX', KEYS[1], 0)
if first and string.sub(first, 1, #ARGV[1]) == ARGV[1] then
  redis.call('LTRIM', KEYS[1], ARGV[2], -1)
end
return redis.call('LRANGE', KEYS[1], 0, ARGV[3] - 1)
