"""Values of `KVConfig` are parsed once, on construction; URLs of shared stores."""

from dataclasses import replace

import pytest

from quire import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.store_url import parse_folder, parse_store_url
from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import codec_spec
from quire.layout.options import option_values
from quire.serve.config import ServerConfig
from support.kv_options import kv_config


def test_sizes_are_bytes_fractions_are_numbers_and_auto_is_none():
    offload = OffloadConfig(kv_memory=7, recompute="0.5", cpu_attention="off")
    config = KVConfig(memory="3MiB", swap_space="1KiB", offload=offload, scratch="1kB")

    assert (config.memory, config.swap_space, config.offload.kv_memory) == (3 << 20, 1024, 7)
    assert (config.scratch, config.prefix_cache.disk_memory) == (1000, 0)
    assert (offload.recompute, offload.cpu_attention) == (0.5, 0.0)
    assert OffloadConfig(recompute=0.25).recompute == 0.25
    assert KVConfig().memory is None
    assert KVConfig().prefix_cache == PrefixCacheConfig(enabled=True, disk_memory=0)
    assert ServerConfig(max_body="1MiB").max_body == 1 << 20
    unset = OffloadConfig()
    assert unset.recompute is unset.cpu_attention is unset.activation_codec is None


def test_config_can_be_replaced_with_parsed_values():
    offload = OffloadConfig(recompute="0.5", activation_codec="int8")
    config = KVConfig(memory="3MiB", offload=offload, swap_space="1KiB")
    assert replace(offload, recompute=None).activation_codec == codec_spec("int8")
    assert replace(config, codec="int8", memory=config.memory).memory == config.memory
    assert replace(config) == config


def test_option_values_are_json_values():
    values = option_values(KVConfig(memory="1KiB", offload=OffloadConfig(activation_codec="int8")))
    assert (values["memory"], values["offload"]["activation_codec"]) == (1024, "int8")
    assert values["offload"]["recompute"] is None
    assert values["prefix_cache"]["enabled"] is True


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory": "lots"}, ConfigError, "--kv-memory: 'lots' is not a size: .*, or auto"),
        ({"memory": 1.5}, ConfigError, "--kv-memory: 1.5 is not a size"),
        ({"swap_space": "some"}, ConfigError, "--swap-space: 'some' is not a size: .*, or auto"),
        ({"scratch": True}, ConfigError, "--scratch: True is not a size"),
        ({"offload_recompute": "2"}, ConfigError, "--kv-offload-recompute: expected auto, off or"),
        ({"offload_recompute": True}, ConfigError, "a fraction from 0 to 1, got True"),
        ({"offload_cpu_attention": "nan"}, ConfigError, "got 'nan'"),
        ({"offload_activation_codec": "int9"}, UnknownName, "unknown codec 'int9'"),
        ({"offload_activation_codec": "int4_page"}, ConfigError, "encodes single tokens"),
        ({"offload_activation_codec": 8}, ConfigError, "--kv-offload-activation-codec: expected"),
    ],
)
def test_invalid_value_is_refused_with_its_option_name(options, error, message):
    with pytest.raises(error, match=message):
        kv_config(**options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (KVConfig, {"offload": {"kv_memory": 1}}, "expected offload to be .*Config, got"),
        (KVConfig, {"prefix_cache": False}, "expected prefix_cache to be .*Config, got"),
        (OffloadConfig, {"recompute": 0.5, "cpu_attention": 0.6}, "of at most 1, got"),
    ],
)
def test_nested_config_and_sum_of_fractions_are_checked(config, options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


# ---- URLs of shared stores -----------------------------------------------------------------------


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
    assert (parse_folder("x/y"), parse_folder("file:///x/y")) == ("x/y", "/x/y")
    with pytest.raises(ConfigError, match="use --remote-kv for it"):
        parse_folder("redis://host")


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
