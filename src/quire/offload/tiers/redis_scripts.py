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

REPAIR = (
    _COMMON
    + """
local list, number = prefix .. ':' .. namespace, prefix .. ':number'
local function kind(key)
    return redis.call('TYPE', key).ok
end
local function count(key)
    local text = kind(key) == 'string' and redis.call('GET', key)
    return text and #text < 16 and string.match(text, '^%d+$') and tonumber(text)
end
local function newest(key)
    local first = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 1)
    local last = tonumber(redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] or 0)
    return first >= 1 and last < 2 ^ 53 and last or nil
end
local function is_whole()
    local expected = {[recent] = 'zset', [sizes] = 'hash', [number] = 'string'}
    for key, of in pairs(expected) do
        if kind(key) ~= 'none' and kind(key) ~= of then return false end
    end
    local sum, of, stored = 0, {}, redis.call('HGETALL', sizes)
    for i = 1, #stored, 2 do
        local space, entry = string.match(stored[i], '^([^:]*):(.*)$')
        if not space or not string.match(stored[i + 1], '^%d+$') then return false end
        local key = prefix .. ':' .. space  -- also of other models: their entries are evicted too
        if not of[key] and kind(key) ~= 'zset' then return false end
        if not redis.call('ZSCORE', recent, stored[i]) then return false end
        if not redis.call('ZSCORE', key, entry) then return false end
        sum, of[key] = sum + stored[i + 1], (of[key] or 0) + 1
    end
    if not of[list] and kind(list) ~= 'none' then return false end
    for key, members in pairs(of) do
        if redis.call('ZCARD', key) ~= members then return false end
    end
    if kind(used) ~= 'none' and count(used) ~= sum then return false end
    if kind(list) ~= 'none' and not (newest(list) and count(number)) then return false end
    if kind(number) ~= 'none' and not (count(number) and newest(list) <= count(number)) then
        return false
    end
    return redis.call('HLEN', sizes) == redis.call('ZCARD', recent)
end
if is_whole() then return 0 end
local last, sum, lists, seen, cursor = count(number) or 0, 0, {}, {}, '0'
redis.call('DEL', recent, sizes, used)
repeat
    local found = redis.call('SCAN', cursor, 'MATCH', prefix .. ':*:*', 'COUNT', 1000)
    cursor = found[1]
    for _, key in ipairs(found[2]) do
        local head = kind(key) == 'hash' and redis.call('HGET', key, 'head')
        local size = head and string.match(head, '"bytes": (%d+)')
        if not size then
            redis.call('UNLINK', key)
        elseif not seen[key] then
            seen[key] = true
            local entry = string.sub(key, #prefix + 2)
            local at = string.find(entry, ':', 1, true)
            local of = prefix .. ':' .. string.sub(entry, 1, at - 1)
            lists[of] = lists[of] or {}
            table.insert(lists[of], string.sub(entry, at + 1))
            redis.call('ZADD', recent, now_us(), entry)
            redis.call('HSET', sizes, entry, size)
            sum = sum + size
        end
    end
until cursor == '0'
lists[list] = lists[list] or {}
for of in pairs(lists) do
    last = math.max(last, kind(of) == 'zset' and newest(of) or 0)
    redis.call('DEL', of)
end
for of, names in pairs(lists) do
    for _, entry in ipairs(names) do
        last = last + 1
        redis.call('ZADD', of, string.format('%d', last), entry)
    end
end
redis.call('SET', used, string.format('%d', sum))
redis.call('SET', number, string.format('%d', last))
return 1
"""
)
"""Check the account, and rebuild a damaged one from the entries; return whether it was damaged.

Damage: keys of another type, numbers that are none, and counts that do not match. Keys of entries
that are no entries are deleted. ARGV: namespace, none.
"""

SECRET = """
local key = KEYS[1] .. ':secret'
local kind = redis.call('TYPE', key).ok
local found = kind == 'string' and redis.call('GET', key)
if found and #found == #ARGV[1] then return {found, 0} end
redis.call('SET', key, ARGV[1])
return {ARGV[1], kind == 'none' and 0 or 1}
"""
"""Return the secret, and whether it was damaged. ARGV: a new secret, set if there is none."""

DROP = _COMMON + "drop(member)\nreturn 1\n"
"""Delete an entry. ARGV: namespace, name."""
