-- The bell rule, shared by the scripts that follow it.
-- A model is covered by each bell on its way and each turn running. Work rings when nothing
-- covers it, or when there is more of it than the covering workers hold and one of the live
-- workers is free.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Bells, turns and live workers are marks that expire within seconds. One that claims to last for minutes was
-- left before the clock of Redis' machine was set back, and would cover work for as long as that was.
local MOST_MARK_MS = 60000

local function alive(marks, now)
  return redis.call('ZCOUNT', marks, now, now + MOST_MARK_MS)
end

local function is_alive(marks, name, now)
  local until_ms = tonumber(redis.call('ZSCORE', marks, name) or 0)
  return until_ms > now and until_ms <= now + MOST_MARK_MS
end

local function forget_dead(marks, now)
  redis.call('ZREMRANGEBYSCORE', marks, '-inf', now)
  redis.call('ZREMRANGEBYSCORE', marks, '(' .. now + MOST_MARK_MS, '+inf')
end

local function covers(bells, turns, now)
  return alive(bells, now) + alive(turns, now)
end

-- Counts a bell and puts its message into the Celery queue in the same step. Producers run it, who may
-- not expire keys of a model (docs/security.md): the next ring and the next turn drop what is old.
local function ring(bells, queue, message, now, bell_ttl_ms)
  local id = 'bell-' .. table.concat(redis.call('TIME'), '-')
  forget_dead(bells, now)
  redis.call('ZADD', bells, now + bell_ttl_ms, id)
  redis.call('LPUSH', queue, (string.gsub(message, '@bell@', id)))
end

-- At `maxmemory` Redis refuses commands that may use memory, but only as a script's first write. This
-- write frees memory, as Redis sees it, and changes nothing: scripts that let a queue drain begin with it.
local function write_at_maxmemory(sorted_set)
  redis.call('ZREMRANGEBYSCORE', sorted_set, '-inf', '-inf')
end

local function ensure_group(stream, group)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  end
end

-- Entries that no worker holds: never claimed.
local function waiting(stream, group)
  local length = redis.call('XLEN', stream)
  if length == 0 then
    return 0
  end
  ensure_group(stream, group)
  return length - redis.call('XPENDING', stream, group)[1]
end
