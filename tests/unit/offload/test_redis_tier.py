import json
import logging
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
import redis

from quire.config.store_url import parse_store_url
from quire.errors import ConfigError, CorruptData, StorageError, TierFull, TierUnreachable
from quire.offload.tiers.base import StoredEntry
from quire.offload.tiers.redis_tier import CHUNK_BYTES, PREFIX, RedisOptions, RedisTier
from support.redis_servers import require_openssl, start_redis
from unit.offload.test_tiers import data_of, read

MIB = 1 << 20


def tier_of(url, namespace="n", **options):
    return RedisTier(parse_store_url(url), namespace, RedisOptions(**options))


def check_works(tier):
    tier.write("a", b"1")
    assert read(tier, "a", 1) == b"1"
    tier.close()


@pytest.fixture
def new_server():
    with ExitStack() as stack:
        yield lambda *options, **other: stack.enter_context(closing(start_redis(*options, **other)))


@pytest.fixture
def server(new_server):
    return new_server()


@pytest.fixture
def client(server):
    with redis.Redis(port=server.port) as opened:
        yield opened


def test_unix_socket_and_password_of_the_url_or_of_the_options(new_server, caplog):
    server = new_server()
    check_works(tier_of(f"unix://{server.socket}"))
    with closing(tier_of(server.url)) as tier:
        assert read(tier, "a", 1) == b"1"
    caplog.set_level(logging.DEBUG)
    server = new_server("--requirepass", "hunter2")
    with_password = server.url.replace("//", "//:hunter2@")
    for url, options in ((with_password, {}), (server.url, {"password": "hunter2"})):
        check_works(tier_of(url, **options))
    for url in (server.url, server.url.replace("//", "//:hunter3@")):
        with pytest.raises(TierUnreachable, match=r"127\.0\.0\.1:\d+/0 failed") as raised:
            tier_of(url).write("a", b"1")
        assert "hunter" not in str(raised.value)
    assert "hunter" not in caplog.text + repr(parse_store_url(with_password))


def certificates(folder):
    program = require_openssl()
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *name]
    files = folder / "cert.pem", folder / "key.pem", folder / "cert.pem"
    command += ["-keyout", str(files[1]), "-out", str(files[0])]
    subprocess.run(command, check=True, capture_output=True)
    return files


def test_tls_needs_a_known_certificate(new_server, tmp_path):
    files = certificates(tmp_path)
    server = new_server(tls=files)
    url = server.url.replace("redis:", "rediss:")
    check_works(tier_of(f"{url}?ssl_ca_certs={files[2]}"))
    with pytest.raises(TierUnreachable, match="certificate"):
        tier_of(url).write("b", b"1")


def test_entries_expire_after_their_last_use_and_leave_the_account(server, client):
    tier = tier_of(server.url, ttl_s=100)
    tier.write("a", bytes(MIB))
    name = f"{PREFIX}:n:a"
    client.pexpire(name, 5_000)
    read(tier, "a", 3)
    assert client.pttl(name) > 90_000  # reads prolong it
    client.pexpire(name, 0)

    with pytest.raises(StorageError, match="nothing is stored under 'a'"):
        read(tier, "a", 3)
    assert tier.used_bytes == 0
    assert tier.names() == set()
    tier.close()

    tier = tier_of(server.url, ttl_s=100)
    for key in "ab":
        tier.write(key, bytes(1000))
    client.zadd(f"{PREFIX}:recent", {"n:a": 1})
    client.delete(f"{PREFIX}:n:a")
    assert tier.used_bytes == 2000

    tier.write("c", bytes(1000))

    assert tier.used_bytes == 2000
    assert tier.names() == {"b", "c"}
    tier.close()


def test_a_server_without_memory_is_full_and_one_that_evicts_corrects_the_account(new_server):
    server = new_server("--maxmemory", "8mb")
    tier = tier_of(server.url)
    assert tier.total_bytes == 8 << 20
    tier.write("a", bytes(100_000))
    with pytest.raises(TierFull, match="is full: "):
        [tier.write(key, bytes(MIB)) for key in "bcdefghij"]
    assert tier.used_bytes == 100_000 + MIB * (len(tier.names()) - 1)
    client = redis.Redis(port=server.port)
    client.delete(f"{PREFIX}:n:a")  # as a policy of the server does

    with pytest.raises(StorageError, match="nothing is stored"):
        read(tier, "a", 1)
    assert "a" not in tier.names()
    assert set(tier.stored()) == tier.names()
    tier.close()
    client.close()


def test_a_server_that_was_emptied_or_has_lost_its_sum_is_used_on(server, client):
    first, second = (tier_of(server.url, max_bytes=3000) for _ in range(2))
    for key in "abc":
        first.write(key, bytes(1000))
    assert set(second.added()) == set("abc")
    client.delete(f"{PREFIX}:used")
    first.write("d", bytes(1000))
    assert first.used_bytes == 3000
    assert first.names() == set("bcd")
    client.flushall()
    first.write("e", bytes(1000))

    assert set(second.added()) == {"e"}
    assert second.used_bytes == 1000
    first.close()
    second.close()


def test_namespaces_share_the_limit_and_a_secret_but_no_entries(server, client):
    first, second = tier_of(server.url), tier_of(server.url, "m")

    assert first.secret() == second.secret()
    assert len(first.secret()) == 32
    client.set(f"{PREFIX}:secret", b"damaged")
    assert len(first.secret()) == 32
    assert first.secret() == second.secret()
    first.close()
    second.close()

    first, second = (tier_of(server.url, name, max_bytes=MIB) for name in "ab")
    first.write("x", bytes(600_000))
    assert second.names() == set()
    second.write("x", bytes(600_000))

    assert first.names() == set()
    assert second.names() == {"x"}
    assert second.used_bytes == first.used_bytes == 600_000
    first.close()
    second.close()


@pytest.mark.parametrize("field", ["head", "1", "1 short", "1 missing"])
def test_damaged_entries_are_named_and_dropped(server, client, field):
    tier = tier_of(server.url)
    data = data_of(2 * CHUNK_BYTES + 9)
    tier.write("a", data)
    name, (key, *how) = f"{PREFIX}:n:a", field.split()
    value = bytearray(client.hget(name, key))
    value[20] ^= 1
    if how == ["missing"]:
        client.hdel(name, key)
    else:
        client.hset(name, key, bytes(value[:-1] if how else value))

    if key == "1":
        assert read(tier, "a", CHUNK_BYTES) == data[:CHUNK_BYTES]  # this chunk is whole
    with pytest.raises(CorruptData, match=r"damaged|chunk 1 of 'a'"):
        read(tier, "a", len(data))
    assert tier.names() == set()
    assert tier.used_bytes == 0
    tier.close()


NAMESPACE = "n"
ANY_TYPE = {
    "string": lambda client, key: client.set(key, "text"),
    "empty string": lambda client, key: client.set(key, ""),
    "not UTF-8": lambda client, key: client.set(key, b"\xff\xfe\0"),
    "large number": lambda client, key: client.set(key, "9" * 300),
    "negative number": lambda client, key: client.set(key, "-7"),
    "fraction": lambda client, key: client.set(key, "1.5"),
    "list": lambda client, key: client.rpush(key, "a"),
    "set": lambda client, key: client.sadd(key, "a"),
    "hash": lambda client, key: client.hset(key, "field", "value"),
    "hash of text": lambda client, key: client.hset(key, mapping={"n:a": "text", "head": "text"}),
    "sorted set": lambda client, key: client.zadd(key, {b"\xff:\xfe": "inf", "x": "-inf"}),
    "nothing": lambda client, key: None,
}
"""Values of any type that replace the value of any key."""
KEYS = ("{entry}", "", ":recent", ":sizes", ":used", ":number", ":secret")


def head_of(client, key, change):
    """Replace the head of an entry; its checksum is right."""
    values = json.loads(client.hget(key, "head")[8:])
    body = json.dumps(change(values)).encode()
    total = zlib.crc32(body, zlib.crc32(key.encode()))
    client.hset(key, "head", b"%08x" % total + body)


def copy_other(client, key):
    store = key.rpartition(":")[0]
    others = [f"{store}:{name.decode()}" for name in client.zrange(store, 0, -1)]
    client.copy(next(other for other in others if other != key), key, replace=True)


def changed_head(**values):
    return lambda client, key: head_of(client, key, lambda old: old | values)


ENTRY_ONLY = {
    "without head": lambda client, key: client.hdel(key, "head"),
    "without chunk": lambda client, key: client.hdel(key, "0"),
    "empty head": lambda client, key: client.hset(key, "head", b""),
    "truncated head": lambda client, key: client.hset(key, "head", client.hget(key, "head")[:-9]),
    "head not UTF-8": lambda client, key: client.hset(key, "head", b"\xff" * 99),
    "truncated chunk": lambda client, key: client.hset(key, "0", client.hget(key, "0")[:-1]),
    "changed chunk": lambda client, key: client.hset(key, "0", b"x" * 1000),
    "another entry": copy_other,
    "head is a list": lambda client, key: head_of(client, key, lambda old: [1]),
    "head without fields": lambda client, key: head_of(client, key, lambda old: {}),
    "head of another version": lambda client, key: (
        head_of(client, key, lambda old: {"v": 2} | old)
        or client.hset(key, "head", b"2" + client.hget(key, "head"))
    ),
    "size is text": changed_head(bytes="1000"),
    "size is negative": changed_head(bytes=-1000),
    "size of more chunks": changed_head(bytes=CHUNK_BYTES + 1),
    "size of fewer bytes": changed_head(bytes=999),
    "facts are text": changed_head(facts="keys"),
    "facts are none": changed_head(facts={}),
    "facts without keys": changed_head(facts={"nature": "n"}),
    "keys are a number": changed_head(facts={"nature": "n", "keys": 7}),
    "keys are no hex": changed_head(facts={"nature": "n", "keys": ["xyz"]}),
    "no keys": changed_head(facts={"nature": "n", "keys": []}),
    "other keys": changed_head(facts={"nature": "n", "keys": ["00ff"]}),
    "sums are text": changed_head(sums="12345678"),
    "no sums": changed_head(sums=[]),
    "sums of another type": changed_head(sums=["a"]),
}
ACCOUNT_ONLY = {
    (":sizes", "text"): lambda client, key: client.hset(key, client.hkeys(key)[0], "text"),
    (":sizes", "too large"): lambda client, key: client.hset(key, client.hkeys(key)[0], 10**12),
    (":sizes", "one more"): lambda client, key: client.hset(key, "n:x", 10),
    (":sizes", "not UTF-8"): lambda client, key: client.hset(key, b"\xff", b"\xff"),
    (":sizes", "one less"): lambda client, key: client.hdel(key, client.hkeys(key)[0]),
    (":recent", "one more"): lambda client, key: client.zadd(key, {b"\xff": "-inf"}),
    (":recent", "one less"): lambda client, key: client.zpopmax(key),
    (":recent", "another"): lambda client, key: client.zpopmax(key) and client.zadd(key, {"x": 0}),
    ("", "one more"): lambda client, key: client.zadd(key, {"x": 1}),
    ("", "not UTF-8"): lambda client, key: client.zadd(key, {b"\xff\xfe": 2}),
    ("", "endless"): lambda client, key: client.zadd(key, {client.zrange(key, 0, 0)[0]: "inf"}),
    ("", "one less"): lambda client, key: client.zpopmax(key),
    ("", "another"): lambda client, key: client.zpopmax(key) and client.zadd(key, {"x": 1}),
    (":used", "too large"): lambda client, key: client.set(key, 10**12),
    (":used", "too small"): lambda client, key: client.set(key, 1),
    (":number", "too small"): lambda client, key: client.set(key, 0),
    (":number", "too large"): lambda client, key: client.set(key, 2**63 - 1),
}
DAMAGES = {
    f"{key or 'index'} {name}": (key, action, True)
    for key in KEYS
    for name, action in ANY_TYPE.items()
}
DAMAGES |= {f"entry {name}": (KEYS[0], action, False) for name, action in ENTRY_ONLY.items()}
DAMAGES |= {f"{k or 'index'} {n}": (k, action, False) for (k, n), action in ACCOUNT_ONLY.items()}
"""Every key of a store with every damage: the key, what changes it, whether it is deleted first."""


def damage_store(client, damage, entry="a", namespace=NAMESPACE):
    """Damage one key of a store; `entry` stands for any entry."""
    key, action, replaces = DAMAGES[damage]
    name = f"{PREFIX}{key}"
    if not key:
        name = f"{PREFIX}:{namespace}"
    elif key == KEYS[0]:
        name = f"{PREFIX}:{namespace}:{entry}"
    if replaces:
        client.delete(name)
    action(client, name)


@pytest.fixture(scope="module")
def shared_client():
    with closing(start_redis()) as started, redis.Redis(port=started.port) as opened:
        opened.url = started.url
        yield opened


def use_again(tier, data):
    """Use a damaged tier until no call fails: entry "a" is never wrong."""
    for _ in range(3):
        damaged = False
        try:
            added = tier.added()
            damaged = any(isinstance(found, CorruptData) for found in added.values())
            if "a" in tier.names():
                size = tier.stored()["a"].num_bytes
                assert read(tier, "a", size) == data[:size]
            tier.write("c", data_of(500, 3), {"keys": ["c"]})
            assert read(tier, "c", 500) == data_of(500, 3)
        except (StorageError, CorruptData, KeyError):
            continue
        if not damaged:
            return
    pytest.fail("the tier does not recover")


@pytest.mark.parametrize("at", ["start", "runtime"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_recovers_and_returns_only_what_was_written(shared_client, damage, at):
    shared_client.flushall()
    tier = tier_of(shared_client.url, max_bytes=MIB)
    data = data_of(1000)
    for name, content in (("a", data), ("b", data_of(1000, 1))):
        tier.write(name, content, {"nature": "n", "keys": ["a"]})
    tier.added()
    secret = tier.secret()
    if at == "start":
        tier.close()
    damage_store(shared_client, damage)
    if at == "start":
        tier = tier_of(shared_client.url, max_bytes=MIB)
        assert len(tier.secret()) == len(secret)
        added = tier.added()
        assert isinstance(added["b"], StoredEntry)
        assert read(tier, "b", 1000) == data_of(1000, 1)

    use_again(tier, data)

    assert len(tier.secret()) == len(secret)
    assert tier.secret() == tier.secret()
    sizes = [stored.num_bytes for stored in tier.stored().values()]
    if at == "start":
        assert "b" in tier.names()
        assert tier.used_bytes == sum(sizes)
    tier.close()


@pytest.mark.parametrize("how", ["paused", "killed"])
def test_a_server_that_stalls_or_dies_costs_no_more_than_the_timeout(server, how):
    tier = tier_of(server.url, timeout_s=1.0)
    tier.write("a", b"123")
    getattr(server, {"paused": "pause", "killed": "kill"}[how])()
    for call in (lambda: read(tier, "a", 3), lambda: tier.write("b", b"1"), tier.added):
        started_s = time.monotonic()
        with pytest.raises(TierUnreachable):
            call()
        assert time.monotonic() - started_s < 30.0  # two attempts, on a busy machine
    if how == "paused":
        server.resume()
        assert read(tier, "a", 3) == b"123"
    tier.close()


def test_a_restarted_server_is_used_again(server, new_server):
    tier = tier_of(server.url)
    tier.write("a", b"123")
    server.kill()
    new_server(port=server.port)

    tier.write("a", b"456")  # the old connection is broken: one more try
    assert read(tier, "a", 3) == b"456"
    tier.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 100, b"HTTP/1.1 400 Bad Request\r\n\r\n", b":1\r\n" * 9, b"$-7\r\n", b"*2\r\n$1\r\n"],
)
def test_a_server_of_another_protocol_is_unreachable(garbage):
    listener = socket.create_server(("127.0.0.1", 0))

    def respond():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                while connection.recv(1 << 16):
                    connection.sendall(garbage)

    thread = threading.Thread(target=respond, daemon=True)
    thread.start()
    tier = tier_of(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)

    for call in (lambda: read(tier, "a", 3), lambda: tier.write("a", b"1"), tier.added):
        with pytest.raises((StorageError, CorruptData)):
            call()
    tier.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_many_threads_read_what_they_wrote(server):
    tier = tier_of(server.url, max_bytes=2 * MIB)

    def fill(name):
        for i in range(10):
            tier.write(name, data_of(100_000, i))
            assert read(tier, name, 100_000) == data_of(100_000, i)

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(fill, "abcd"))) == 4
    assert tier.names() == set("abcd")
    assert tier.used_bytes == 400_000
    tier.close()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"redis \(not installed\): pip install .*\[redis\]"):
        tier_of("redis://127.0.0.1:1")


@pytest.mark.slow
def test_the_engine_does_not_import_the_package():
    code = (
        "import sys, quire.api.llm, quire.engine.open_tier, quire.offload.tiers.redis_tier\n"
        "assert 'redis' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
