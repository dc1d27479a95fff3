"""What a Redis or Valkey store holds, and the scripts that keep its account.

    {quire:kv:1}:<namespace>:<entry>   hash: head (size, facts, checksums), 0, 1, ... (chunks)
    {quire:kv:1}:<namespace>           sorted set of its entries by a number that grows
    {quire:kv:1}:recent                sorted set of all entries by the time of their last use
    {quire:kv:1}:sizes                 hash of their bytes
    {quire:kv:1}:used                  sum of these
    {quire:kv:1}:number                number of the newest entry
    {quire:kv:1}:secret                secret of tenants' salts

All keys have one hash tag, so a cluster stores them in one slot. A script runs as a whole: no other
client sees or changes the account meanwhile. Times are those of the server.
"""

PREFIX = "{quire:kv:1}"

_COMMON = """
local prefix, namespace, name = KEYS[1], ARGV[1], ARGV[2]
local recent, sizes, used = prefix .. ':recent', prefix .. ':sizes', prefix .. ':used'
local member = namespace .. ':' .. name
local function drop(found)
    local size = redis.call('HGET', sizes, found)
    redis.call('ZREM', recent, found)
    if size then
        redis.call('HDEL', sizes, found)
        redis.call('DECRBY', used, size)
    end
    local at = string.find(found, ':', 1, true)
    local of = prefix .. ':' .. string.sub(found, 1, at - 1)
    redis.call('ZREM', of, string.sub(found, at + 1))
    redis.call('UNLINK', prefix .. ':' .. found)
end
local function now_us()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end
"""

ADD = (
    _COMMON
    + """
local size, most, ttl_ms = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_us()
drop(member)
if ttl_ms > 0 then
    local over = now - 1000 * ttl_ms
    for _, old in ipairs(redis.call('ZRANGEBYSCORE', recent, '-inf', over, 'LIMIT', 0, 100)) do
        drop(old)
    end
end
if redis.call('EXISTS', used) == 0 then
    local sum = 0
    for _, bytes in ipairs(redis.call('HVALS', sizes)) do sum = sum + bytes end
    redis.call('SET', used, sum)
end
local total = tonumber(redis.call('GET', used))
while most > 0 and total + size > most do
    local old = redis.call('ZRANGE', recent, 0, 0)[1]
    if not old then break end
    drop(old)
    total = tonumber(redis.call('GET', used))
end
redis.call('ZADD', recent, now, member)
redis.call('HSET', sizes, member, size)
redis.call('INCRBY', used, size)
redis.call('ZADD', prefix .. ':' .. namespace, redis.call('INCR', prefix .. ':number'), name)
return 1
"""
)
"""Count an entry that is about to be written, after making room for it.

Entries whose time is over leave the account. Then the least recently used ones are deleted until
the new one fits. ARGV: namespace, name, bytes, most bytes of all entries (0: no limit), time to
live in ms (0: none).
"""

TOUCH = (
    _COMMON
    + """
if redis.call('EXISTS', prefix .. ':' .. member) == 0 then
    drop(member)
    return 0
end
redis.call('ZADD', recent, 'XX', now_us(), member)
if tonumber(ARGV[3]) > 0 then redis.call('PEXPIRE', prefix .. ':' .. member, ARGV[3]) end
return 1
"""
)
"""Note the use of an entry, or remove it from the account if it has expired or was evicted.

ARGV: namespace, name, time to live in ms (0: none).
"""

DROP = _COMMON + "drop(member)\nreturn 1\n"
"""Delete an entry. ARGV: namespace, name."""
