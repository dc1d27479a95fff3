"""Redis tier: entries in a Redis or Valkey server that several engines share.

    write    one transaction: account (script), chunks with their checksums, expiry
    read     one round trip: head and the chunks of the range; checksums compared

The store is bounded by an own account of bytes in the server, which every engine sees. The
`maxmemory` of a server bounds the whole server instead, needs a configuration that clients cannot
check, and with its default policy refuses writes. If it evicts entries anyway, a read finds them
missing and corrects the account.
"""

import contextlib
import importlib
import secrets
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.store_url import StoreURL
from quire.errors import CorruptData, StorageError, TierFull, TierUnreachable
from quire.layout.extras import require_extra
from quire.offload.tiers.base import SECRET_BYTES, Bytes, Stored, check_range, flat
from quire.offload.tiers.redis_entries import CHUNK_BYTES, Head, join, packed_head, read_head
from quire.offload.tiers.redis_scripts import ADD, DROP, PREFIX, REPAIR, SECRET, TOUCH

_BATCH = 256  # entries whose heads are read in one round trip
_MOST_NUMBER = "+inf"
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """How a Redis tier uses its server.

    Attributes:
        most_bytes: most bytes of the entries of all engines; 0: no limit of its own.
        ttl_s: seconds after its last use when an entry expires; 0: never.
        timeout_s: seconds without a byte after which the server counts as unreachable.
        username, password: login; they replace those of the URL.
    """

    most_bytes: int = 0
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
        if self._options.most_bytes:
            return self._options.most_bytes
        with contextlib.suppress(StorageError), self._calls():
            return int(self._client.info("memory").get("maxmemory", 0))
        return 0

    @property
    def used_bytes(self) -> int:
        """See `Tier`. Counts the entries of all engines and models."""
        with contextlib.suppress(StorageError), self._calls():
            return int(self._client.get(f"{PREFIX}:used") or 0)
        return 0

    def stored(self) -> dict[str, Stored]:
        """See `Tier`."""
        return {name: head.stored for name, head in self._heads(sorted(self.names()))}

    def names(self) -> set[str]:
        """See `Tier`."""
        with self._calls():
            return {_text(name) for name in self._client.zrange(self._list_key, 0, -1)}

    def added(self) -> dict[str, Stored | CorruptData]:
        """See `Tier`."""
        with self._turn, self._calls():
            self._repair()
            if int(self._client.get(f"{PREFIX}:number") or 0) < self._newest:
                self._newest = 0  # the server was emptied, and counts from 1 again
            found = self._client.zrangebyscore(
                self._list_key, f"({self._newest}", _MOST_NUMBER, withscores=True
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
        source, most_bytes = flat(data), self._options.most_bytes
        if most_bytes and source.nbytes > most_bytes:
            raise TierFull(
                f"{key!r} needs {source.nbytes:,} B, and the store has {most_bytes:,} B; raise "
                "--remote-kv-memory"
            )
        chunks = [source[at : at + CHUNK_BYTES] for at in range(0, source.nbytes, CHUNK_BYTES)]
        name, sums = self._key_of(key), [zlib.crc32(chunk) for chunk in chunks]
        head = packed_head(name, source.nbytes, facts or {}, sums)
        fields: dict[str, object] = {str(n): chunk for n, chunk in enumerate(chunks)}
        try:
            with self._calls(), self._client.pipeline(transaction=True) as batch:
                self._repair()
                self._run(batch, ADD, key, source.nbytes, most_bytes, self._ttl_ms)
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

    def least_recent(self, num_bytes: int) -> list[str]:
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
            text = f"{error}"[:_MOST_TEXT] or type(error).__name__
            raise TierUnreachable(f"the store at {self._url} failed: {text}") from error


def _text(name: bytes) -> str:
    """A name in a list of entries; any bytes, which the client encodes again."""
    return name.decode(errors="surrogateescape")
