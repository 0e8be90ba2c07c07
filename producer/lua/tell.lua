-- Tells senders what became of their tasks, outside of a settlement.
-- KEYS  any sorted set, reply lists, result keys
-- ARGV  reply expiry in s, number of reply lists, then a frame for each of them, then a frame
--       and its expiry in s for each result key
write_at_maxmemory(KEYS[1])
local lists = tonumber(ARGV[2])
for index = 1, lists do
  redis.call('RPUSH', KEYS[1 + index], ARGV[2 + index])
  redis.call('EXPIRE', KEYS[1 + index], ARGV[1])
end
for index = 1, #KEYS - 1 - lists do
  local first = 2 + lists + 2 * index - 1
  redis.call('SET', KEYS[1 + lists + index], ARGV[first], 'EX', ARGV[first + 1])
end
