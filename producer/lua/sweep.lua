-- Removes consumers that hold nothing and whose worker no longer lives. A live worker that is taken
-- for dead loses nothing: its next claim makes its consumer again.
-- What they hold waits for its lease; where even that cannot run out, because it began before the clock of
-- Redis' machine was set back, it is handed back here.
-- KEYS  workers, streams    ARGV  group, idle in ms of what is handed back (0: nothing is)
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
      if is_alive(workers, consumer.name, now) then
        -- It renews its leases itself.
      elseif consumer.pending > 0 then
        local held = ARGV[2] ~= '0' and redis.call('XPENDING', stream, group, '-', '+', 1000, consumer.name)
        for _, entry in ipairs(held or {}) do
          -- Its owner did not claim it just now: Redis says 0 for all that it cannot have been idle.
          if entry[3] == 0 then
            redis.call('XCLAIM', stream, group, 'released', 0, entry[1], 'IDLE', ARGV[2], 'RETRYCOUNT', entry[4], 'JUSTID')
          end
        end
      else
        redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
        removed = removed + 1
      end
    end
  end
end
return removed
