-- Removes consumers that hold nothing and whose worker no longer lives. A live worker that is taken
-- for dead loses nothing: its next claim makes its consumer again.
-- KEYS  workers, streams    ARGV  group
-- Returns how many were removed.
local workers, group = KEYS[1], ARGV[1]
local now = now_ms()
write_at_maxmemory(workers)
local removed = 0
for index = 2, #KEYS do
  local stream = KEYS[index]
  if redis.call('EXISTS', stream) == 1 then
    ensure_group(stream, group)
    for _, facts in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
      local consumer = {}
      for field = 1, #facts, 2 do
        consumer[facts[field]] = facts[field + 1]
      end
      -- Removing a consumer drops what it holds, so both are one step.
      if consumer.pending == 0 and tonumber(redis.call('ZSCORE', workers, consumer.name) or 0) <= now then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
        removed = removed + 1
      end
    end
  end
end
return removed
