-- Token buckets, which bound how many rows a model takes in a time.
-- A bucket's debt is the rows taken and not yet earned back; it admits rows while its debt with
-- them is at most its burst. One that owes nothing needs no key, so a key expires when debt ends.
-- One from a time more than this ahead was left before the clock of Redis' machine was set back.
local MOST_AHEAD_MS = 60000
-- Redis refuses expiries that are no number of ms, and would in the middle of a script.
local MOST_MS = 2 ^ 52

local function open_bucket(key, rows_per_s, burst_rows, now)
  local bucket = {key = key, rows_per_ms = rows_per_s / 1000, burst_rows = burst_rows, debt_rows = 0, now = now}
  local state = redis.call('GET', key)
  if state then
    local debt_rows, at = cmsgpack.unpack(state)
    if at <= now + MOST_AHEAD_MS then
      bucket.debt_rows = math.max(0, debt_rows - math.max(0, now - at) * bucket.rows_per_ms)
    end
  end
  return bucket
end

-- Takes rows from all buckets or from none. Returns 0, or the ms until all of them have room.
local function take_rows(buckets, rows)
  local wait_ms = 0
  for _, bucket in ipairs(buckets) do
    local missing_rows = bucket.debt_rows + rows - bucket.burst_rows
    if missing_rows > 0 then
      wait_ms = math.max(wait_ms, math.min(MOST_MS, math.ceil(missing_rows / bucket.rows_per_ms)))
    end
  end
  if wait_ms == 0 then
    for _, bucket in ipairs(buckets) do
      bucket.debt_rows = bucket.debt_rows + rows
    end
  end
  return wait_ms
end

local function close_bucket(bucket)
  local left_ms = math.min(MOST_MS, math.max(1, math.ceil(bucket.debt_rows / bucket.rows_per_ms)))
  -- No SET: see add.lua.
  redis.call('GETSET', bucket.key, cmsgpack.pack(bucket.debt_rows, bucket.now))
  redis.call('GETEX', bucket.key, 'PX', string.format('%.0f', left_ms))
end
