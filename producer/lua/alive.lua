-- How many workers of a model live. Producers run it, who may not `look`.
-- KEYS  workers
return alive(KEYS[1], now_ms())
