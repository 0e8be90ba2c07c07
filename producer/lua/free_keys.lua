-- Frees the idempotency keys of tasks that were taken out of the queue, and tells who waits for them.
-- KEYS  any sorted set, records    ARGV  prefix of reply lists, reply expiry in s, each record's entry
write_at_maxmemory(KEYS[1])
for index = 2, #KEYS do
  end_key(KEYS[index], ARGV[index + 1], false, ARGV[1], ARGV[2])
end
