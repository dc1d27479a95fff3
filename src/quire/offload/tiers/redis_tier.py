"""Redis tier: entries in a Redis or Valkey server that several engines share.

    write    one transaction: account (script), chunks with their checksums, expiry
    read     one round trip: head and the chunks of the range; checksums compared

The store is bounded by an own account of bytes in the server, which every engine sees. The
`maxmemory` of a server bounds the whole server instead, needs a configuration that clients cannot
check, and with its default policy refuses writes. If it evicts entries anyway, a read finds them
missing and corrects the account.

What a Redis or Valkey store holds, and the scripts that keep its account.

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

import contextlib
import importlib
import itertools
import json
import secrets
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.store_url import StoreURL
from quire.errors import CorruptData, StorageError, TierFull, TierUnreachable
from quire.layout.extras import require_extra
from quire.offload.tiers.base import SECRET_BYTES, Bytes, StoredEntry, check_range, flat

CHUNK_BYTES = 256 << 10
"""Bytes that share a checksum."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an entry.

    Attributes:
        stored: size and facts.
        sums: checksum of each chunk.
    """

    stored: StoredEntry
    sums: tuple[int, ...]


def packed_head(name: str, num_bytes: int, facts: Mapping[str, Any], sums: Iterable[int]) -> bytes:
    """Encode the head of the entry with this name: its checksum, then JSON."""
    rest = json.dumps({"bytes": num_bytes, "facts": dict(facts), "sums": list(sums)}).encode()
    return _head_sum(name, rest) + rest


def read_head(name: str, packed: object) -> Head:
    """Parse the head of the entry with this name.

    Raises:
        CorruptData: it is not a head of this format, or that of another entry.
    """
    try:
        if not isinstance(packed, bytes) or packed[:8] != _head_sum(name, packed[8:]):
            raise ValueError("wrong checksum")
        values = json.loads(packed[8:])
        num_bytes, facts, sums = values["bytes"], values["facts"], tuple(values["sums"])
        if type(num_bytes) is not int or len(sums) != -(-num_bytes // CHUNK_BYTES):
            raise ValueError("wrong size")
        if not isinstance(facts, dict) or not all(type(one) is int for one in sums):
            raise TypeError("wrong facts")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CorruptData(f"the head of {name!r} is damaged: {error}") from error
    return Head(StoredEntry(num_bytes, facts), sums)


def _head_sum(name: str, rest: bytes) -> bytes:
    return b"%08x" % zlib.crc32(rest, zlib.crc32(name.encode(errors="surrogateescape")))


def join(
    key: str,
    numbers: range,
    chunks: list[Any],
    num_bytes: int,
    sums: tuple[int, ...],
    target: memoryview,
    first: int,
) -> None:
    """Copy a range out of its chunks.

    Raises:
        CorruptData: a chunk is missing, or its bytes differ from those that were written.
    """
    end = first + target.nbytes
    for number, chunk in itertools.zip_longest(numbers, chunks):
        start = number * CHUNK_BYTES
        length = min(CHUNK_BYTES, num_bytes - start)
        is_whole = isinstance(chunk, bytes) and len(chunk) == length
        if not is_whole or zlib.crc32(chunk) != sums[number]:
            raise CorruptData(
                f"chunk {number} of {key!r} differs from what was written; the entry is dropped"
            )
        low, high = max(first, start), min(end, start + length)
        target[low - first : high - first] = chunk[low - start : high - start]


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

_BATCH = 256  # entries whose heads are read in one round trip
_MAX_NUMBER = "+inf"
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """How a Redis tier uses its server.

    Attributes:
        max_bytes: most bytes of the entries of all engines; 0: no limit of its own.
        ttl_s: seconds after its last use when an entry expires; 0: never.
        timeout_s: seconds without a byte after which the server counts as unreachable.
        username, password: login; they replace those of the URL.
    """

    max_bytes: int = 0
    ttl_s: int | float = 0
    timeout_s: int | float = 0.5
    username: str | None = None
    password: str | None = field(default=None, repr=False)


class RedisTier:
    """`Tier` in a Redis or Valkey server.

    Calls open the connection when they need it. A connection that failed is closed, and the next
    call opens another one.

    Args:
        url: address of the server.
        namespace: name of the entries that this object sees; no colon.
        options: limits and login.

    Raises:
        ConfigError: the package redis is not installed.
    """

    def __init__(
        self, url: StoreURL, namespace: str, options: RedisOptions = RedisOptions()
    ) -> None:
        require_extra("redis", f"--remote-kv {url.scheme}://")
        self._url, self._namespace, self._options = url, namespace, options
        self._ttl_ms = round(options.ttl_s * 1000)
        self._redis: Any = importlib.import_module("redis")
        self._client = self._connect()
        self._turn = threading.Lock()
        self._newest = 0
        self._is_checked = False  # whether the account is known to be whole
        self._damaged = dict[str, CorruptData]()

    def _connect(self) -> Any:
        url, options = self._url, self._options
        places: dict[str, Any] = {"host": url.host, "port": url.port}
        if url.scheme == "unix":
            places = {"unix_socket_path": url.path}
        elif url.scheme == "rediss":
            places |= {"ssl": True, **dict(url.files)}
        no_wait = importlib.import_module("redis.backoff").NoBackoff()
        # a server may have closed an idle connection: one more try, none after a timeout
        again = importlib.import_module("redis.retry").Retry(
            no_wait, 1, supported_errors=(self._redis.ConnectionError,)
        )
        return self._redis.Redis(
            **places,
            db=url.database,
            username=options.username or url.username,
            password=options.password or url.password,
            socket_timeout=options.timeout_s,
            socket_connect_timeout=options.timeout_s,
            socket_read_size=1 << 20,
            retry=again,
            protocol=2,
            encoding_errors="surrogateescape",  # names in a damaged list may be any bytes
        )

    @property
    def total_bytes(self) -> int:
        """See `Tier`; without a limit of its own, that of the server, and 0 if it has none."""
        if self._options.max_bytes:
            return self._options.max_bytes
        with contextlib.suppress(StorageError), self._calls():
            return int(self._client.info("memory").get("maxmemory", 0))
        return 0

    @property
    def used_bytes(self) -> int:
        """See `Tier`. Counts the entries of all engines and models."""
        with contextlib.suppress(StorageError), self._calls():
            return int(self._client.get(f"{PREFIX}:used") or 0)
        return 0

    def stored(self) -> dict[str, StoredEntry]:
        return {name: head.stored for name, head in self._heads(sorted(self.names()))}

    def names(self) -> set[str]:
        with self._calls():
            return {_text(name) for name in self._client.zrange(self._list_key, 0, -1)}

    def added(self) -> dict[str, StoredEntry | CorruptData]:
        with self._turn, self._calls():
            self._repair()
            if int(self._client.get(f"{PREFIX}:number") or 0) < self._newest:
                self._newest = 0  # the server was emptied, and counts from 1 again
            found = self._client.zrangebyscore(
                self._list_key, f"({self._newest}", _MAX_NUMBER, withscores=True
            )
            names = [_text(name) for name, _ in found]
            newest = max((int(number) for _, number in found), default=self._newest)
            heads = dict(self._heads(names))
            self._newest = newest
            damaged, self._damaged = self._damaged, {}
        return {name: head.stored for name, head in heads.items()} | damaged

    def _repair(self) -> None:
        """Rebuild a damaged account; checked at the start and after every failure."""
        if not self._is_checked:
            if self._client.eval(REPAIR, 1, PREFIX, self._namespace, ""):
                text = f"the account of the store at {self._url} was damaged and is rebuilt"
                self._damaged[PREFIX] = CorruptData(text)
            self._is_checked = True

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """See `Tier`. Evicts the least recently used entries of all engines.

        Raises:
            TierFull: the entry exceeds the limit, or the server refuses more memory.
            TierUnreachable: the server did not respond in time.
        """
        source, max_bytes = flat(data), self._options.max_bytes
        if max_bytes and source.nbytes > max_bytes:
            raise TierFull(
                f"{key!r} needs {source.nbytes:,} B, and the store has {max_bytes:,} B; raise "
                "--remote-kv-memory"
            )
        chunks = [source[at : at + CHUNK_BYTES] for at in range(0, source.nbytes, CHUNK_BYTES)]
        name, sums = self._key_of(key), [zlib.crc32(chunk) for chunk in chunks]
        head = packed_head(name, source.nbytes, facts or {}, sums)
        fields: dict[str, object] = {str(n): chunk for n, chunk in enumerate(chunks)}
        try:
            with self._calls(), self._client.pipeline(transaction=True) as batch:
                self._repair()
                self._run(batch, ADD, key, source.nbytes, max_bytes, self._ttl_ms)
                batch.hset(name, mapping={"head": head} | fields)
                if self._ttl_ms:
                    batch.pexpire(name, self._ttl_ms)
                batch.execute()
        except TierFull:  # refused by the server, but counted: a transaction has no rollback
            self.drop(key)
            raise

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        """See `Tier`.

        Raises:
            TierUnreachable: the server did not respond in time.
        """
        numbers = range(first // CHUNK_BYTES, -(-(first + into.nbytes) // CHUNK_BYTES))
        name = self._key_of(key)
        with self._calls(), self._client.pipeline(transaction=False) as batch:
            batch.hmget(name, ["head", *numbers])
            self._run(batch, TOUCH, key, self._ttl_ms)
            found, exists = batch.execute(raise_on_error=False)
            if isinstance(exists, Exception):  # a damaged account; the entry may be whole
                self._is_checked, exists = False, True
            found = self._checked_value(key, found)
        try:
            if isinstance(found, CorruptData):
                raise found
            packed, *chunks = found[: 1 + len(numbers)]
            head = None if packed is None and not exists else read_head(name, packed)
            stored = check_range(key, None if head is None else head.stored, into, first)
            assert head is not None, "a stored entry has a head"
            join(key, numbers, chunks, stored.num_bytes, head.sums, flat(into), first)
        except CorruptData:
            self.drop(key)
            raise

    def min_recent(self, num_bytes: int) -> list[str]:
        """See `Tier`. The store evicts entries by itself."""
        return []

    def drop(self, key: str) -> None:
        """See `Tier`. If the server cannot be reached, the entry stays."""
        with contextlib.suppress(StorageError), self._calls():
            self._run(self._client, DROP, key)

    def secret(self) -> bytes:
        """See `Tier`. A damaged one is replaced."""
        with self._calls():
            found, is_new = self._client.eval(SECRET, 1, PREFIX, secrets.token_bytes(SECRET_BYTES))
            if is_new:
                text = f"the secret of the store at {self._url} was damaged and is replaced"
                self._damaged["secret"] = CorruptData(text)
        return bytes(found)

    def close(self) -> None:
        """Close the connections; entries are retained."""
        with contextlib.suppress(*self._failures):
            self._client.close()

    # ---- the server ----------------------------------------------------------------------------

    @property
    def _list_key(self) -> str:
        return f"{PREFIX}:{self._namespace}"

    def _key_of(self, key: str) -> str:
        return f"{PREFIX}:{self._namespace}:{key}"

    def _run(self, client: Any, script: str, key: str, *arguments: object) -> None:
        client.eval(script, 1, PREFIX, self._namespace, key, *arguments)

    def _heads(self, names: list[str]) -> Iterator[tuple[str, Head]]:
        """The heads of entries that exist; entries that are damaged are dropped and noted."""
        for start in range(0, len(names), _BATCH):
            batch_names = names[start : start + _BATCH]
            with self._calls(), self._client.pipeline(transaction=False) as batch:
                for name in batch_names:
                    batch.hget(self._key_of(name), "head")
                found = batch.execute(raise_on_error=False)
                for name, packed in zip(batch_names, found, strict=True):
                    if packed is None:
                        self._run(batch, TOUCH, name, self._ttl_ms)
                exists = iter(batch.execute())
            for name, packed in zip(batch_names, found, strict=True):
                if packed is None and not next(exists):
                    continue
                try:
                    value = self._checked_value(name, packed)
                    if isinstance(value, CorruptData):
                        raise value
                    yield name, read_head(self._key_of(name), value)
                except CorruptData as error:
                    self._damaged[name] = error
                    self.drop(name)

    def _checked_value(self, key: str, value: Any) -> Any:
        """The response to one command of several; `CorruptData` if its key has another type."""
        if isinstance(value, self._redis.ResponseError) and str(value).startswith("WRONGTYPE"):
            return CorruptData(f"{key!r} is not a hash, as entries are")
        if isinstance(value, Exception):
            raise value
        return value

    @property
    def _failures(self) -> tuple[type[BaseException], ...]:
        """What a call raises if the server is gone, slow, or sends bytes of another protocol."""
        broken = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
        return (self._redis.RedisError, OSError, *broken)

    @contextlib.contextmanager
    def _calls(self) -> Iterator[None]:
        """Convert errors of the client; afterwards no connection has bytes of an old response."""
        try:
            yield
        except StorageError:  # of a nested call
            raise
        except self._failures as error:
            self._is_checked = False
            with contextlib.suppress(*self._failures):
                self._client.connection_pool.disconnect()
            if isinstance(error, self._redis.exceptions.OutOfMemoryError):
                raise TierFull(
                    f"the store at {self._url} is full: its maxmemory is reached; raise it above "
                    "--remote-kv-memory"
                ) from error
            text = f"{error}"[:_MAX_TEXT] or type(error).__name__
            raise TierUnreachable(f"the store at {self._url} failed: {text}") from error


def _text(name: bytes) -> str:
    """A name in a list of entries; any bytes, which the client encodes again."""
    return name.decode(errors="surrogateescape")
