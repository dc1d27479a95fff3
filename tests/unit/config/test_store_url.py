"""URLs of shared stores."""

import pytest

from quire.config.kv_config import PrefixCacheConfig
from quire.config.store_url import parse_folder, parse_store_url
from quire.errors import ConfigError
from quire.layout.options import option_values


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://host:1/3", "redis://host:1/3"),
        ("valkey://user:secret@host:1", "redis://host:1/0"),
        ("valkeys://[::1]:7", "rediss://[::1]:7/0"),
        ("rediss://host?ssl_ca_certs=/x", "rediss://host:6379/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
        ("unix://:secret@/run/redis.sock", "unix:///run/redis.sock"),
        ("file:///var/lib/kv%20store", "file:///var/lib/kv store"),
    ],
)
def test_url_is_parsed_and_shown_without_its_password(text, shown):
    url = parse_store_url(text)

    assert str(url) == shown
    assert "secret" not in f"{url} {url!r}"
    assert parse_store_url(url) is url


def test_login_database_and_files():
    url = parse_store_url("rediss://a%40b:p%2Fw@host/5?ssl_certfile=c&ssl_ca_certs=a")

    assert (url.username, url.password, url.database) == ("a@b", "p/w", 5)
    assert url.files == (("ssl_ca_certs", "a"), ("ssl_certfile", "c"))
    assert parse_store_url("unix:///x?db=3").database == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.7:8700", "expected redis://HOST:PORT"),
        ("kv://10.0.0.7:8700", r"expected redis://HOST:PORT, .*got 'kv://10.0.0.7:8700'"),
        ("nowhere", r"expected redis://HOST:PORT, .*got 'nowhere'"),
        ("http://:secret@host", r"expected redis://HOST:PORT, .*got 'http://host'"),
        ("redis://:secret@host:x", r"got 'redis://host:x'"),
        ("redis://:secret@", "expected a host"),
        ("redis://host/x", "expected redis://HOST:PORT"),
        ("redis://host?ttl=3", r"after '\?', got ttl"),
        ("redis://host?ssl_ca_certs=x", r"got ssl_ca_certs"),
        ("unix://relative", "expected an absolute path"),
        ("file://host/folder", "expected an absolute path"),
        ("file:///", "expected an absolute path"),
        (7, "got 7"),
    ],
)
def test_other_texts_are_refused_without_the_password(text, says):
    with pytest.raises(ConfigError, match=says) as raised:
        parse_store_url(text)
    assert "secret" not in str(raised.value)


def test_folder_may_be_a_url():
    assert parse_folder("x/y") == "x/y"
    assert parse_folder("file:///x/y") == "/x/y"
    with pytest.raises(ConfigError, match="use --remote-kv for it"):
        parse_folder("redis://host")


def test_options_as_json_have_no_password():
    config = PrefixCacheConfig(remote="redis://user:secret@host")

    assert option_values(config)["remote"] == "redis://host:6379/0"
    assert "secret" not in repr(config)
    assert option_values(PrefixCacheConfig())["remote"] is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"remote_ttl_s": -1.0}, "--remote-kv-ttl of 0 or more"),
        ({"remote_ttl_s": float("nan")}, "--remote-kv-ttl of 0 or more"),
        ({"remote_timeout_s": 0.0}, "--remote-kv-timeout above 0"),
        ({"remote_timeout_s": 100.0}, "up to 60 seconds"),
        ({"remote": "a:1"}, "--remote-kv: expected redis://HOST:PORT"),
        ({"write": "x"}, "expected kv-write to be one of back, through"),
    ],
)
def test_invalid_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        PrefixCacheConfig(**options)
