-- How tasks enter a stream, shared by the scripts that add them.
-- ARGV[1] holds what stays the same from call to call, as a msgpack array: group, seen expiry in s, bell
-- ttl in ms, cover rows, max rows, max bytes, bucket of the model, bucket of the client.
local group, seen_s, bell_ttl_ms, cover_rows, max_rows, max_bytes, bucket, client_bucket =
  unpack(cmsgpack.unpack(ARGV[1]))

-- The token buckets of the model's rate limits, or nil if it has none.
local function open_buckets(limits)
  if redis.call('EXISTS', limits) == 0 then
    return nil
  end
  local fields, limit = redis.call('HGETALL', limits), {}
  for index = 1, #fields, 2 do
    limit[fields[index]] = tonumber(fields[index + 1])
  end
  local buckets, now = {}, now_ms()
  if limit.rows_per_s then
    buckets[1] = open_bucket(bucket, limit.rows_per_s, limit.burst_rows, now)
  end
  if limit.per_client_rows_per_s then
    local rows_per_s, burst_rows = limit.per_client_rows_per_s, limit.per_client_burst_rows
    buckets[#buckets + 1] = open_bucket(client_bucket, rows_per_s, burst_rows, now)
  end
  return buckets
end

-- Writes the accounts of what was added and rings if the bell rule says so. `first` is the place of
-- these KEYS: bells, turns, workers, bell queue, load; `rows` is the load from now on, of which
-- `added_rows` and `added_bytes` are new. Returns 1 if it rang.
local function account(first, rows, added_rows, added_bytes, buckets, message)
  local bells, turns, load = KEYS[first], KEYS[first + 1], KEYS[first + 4]
  redis.call('HINCRBY', load, 'rows', added_rows)
  redis.call('HINCRBY', load, 'bytes', added_bytes)
  local now = now_ms()
  if buckets then
    for _, one in ipairs(buckets) do
      close_bucket(one)
    end
  end
  local covered = covers(bells, turns, now)
  local needed = 0
  if covered == 0 then
    needed = 1
  elseif rows > covered * cover_rows then
    needed = math.min(1, alive(KEYS[first + 2], now) - covered)
  end
  if needed > 0 then
    ring(bells, KEYS[first + 3], message, now, bell_ttl_ms)
    return 1
  end
  return 0
end
