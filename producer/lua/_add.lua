-- How tasks enter a stream, shared by the scripts that add them: limits, then the bell rule.
-- From the place `first`, KEYS are: bells, turns, workers, bell queue, load, limits, bucket of the model,
-- bucket of the client.
local function open_queue(first, max_rows, max_bytes)
  local names = {
    bells = KEYS[first], turns = KEYS[first + 1], workers = KEYS[first + 2], bell_queue = KEYS[first + 3],
    load = KEYS[first + 4], limits = KEYS[first + 5], bucket = KEYS[first + 6], client_bucket = KEYS[first + 7],
  }
  local held = redis.call('HMGET', names.load, 'rows', 'bytes')
  local queue = {
    names = names, max_rows = max_rows, max_bytes = max_bytes, added_rows = 0, added_bytes = 0,
    rows = tonumber(held[1] or 0), bytes = tonumber(held[2] or 0),
  }
  local limits = redis.call(
    'HMGET', names.limits, 'rows_per_s', 'burst_rows', 'per_client_rows_per_s', 'per_client_burst_rows'
  )
  if limits[1] or limits[3] then
    queue.now = now_ms()
    queue.buckets = {}
    if limits[1] then
      queue.buckets[1] = open_bucket(names.bucket, tonumber(limits[1]), tonumber(limits[2]), queue.now)
    end
    if limits[3] then
      local bucket = open_bucket(names.client_bucket, tonumber(limits[3]), tonumber(limits[4]), queue.now)
      queue.buckets[#queue.buckets + 1] = bucket
    end
  end
  return queue
end

-- Returns 0 if the queue has taken the rows and bytes on its account, false if it is full, or the ms
-- after which a rate limit may let them in.
local function admit(queue, rows, bytes)
  if queue.rows + queue.added_rows + rows > queue.max_rows
    or queue.bytes + queue.added_bytes + bytes > queue.max_bytes then
    return false
  end
  if queue.buckets then
    local wait_ms = take_rows(queue.buckets, rows)
    if wait_ms > 0 then
      return wait_ms
    end
  end
  queue.added_rows = queue.added_rows + rows
  queue.added_bytes = queue.added_bytes + bytes
  return 0
end

-- Writes the accounts and rings if the bell rule says so. Returns 1 if it rang.
local function close_queue(queue, cover_rows, message, bell_ttl_ms)
  if queue.added_rows == 0 then
    return 0
  end
  local names = queue.names
  redis.call('HINCRBY', names.load, 'rows', queue.added_rows)
  redis.call('HINCRBY', names.load, 'bytes', queue.added_bytes)
  for _, bucket in ipairs(queue.buckets or {}) do
    close_bucket(bucket, queue.now)
  end
  local now = now_ms()
  local covered = covers(names.bells, names.turns, now)
  local needed = 0
  if covered == 0 then
    needed = 1
  elseif queue.rows + queue.added_rows > covered * cover_rows then
    needed = math.min(1, redis.call('ZCOUNT', names.workers, now, '+inf') - covered)
  end
  if needed > 0 then
    ring(names.bells, names.bell_queue, message, now, bell_ttl_ms)
    return 1
  end
  return 0
end
