"""Sizes, fractions and codecs of `KVConfig` are parsed once, on construction."""

from dataclasses import replace

import pytest

from quire import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import codec_spec
from quire.layout.options import option_values
from quire.serve.config import ServerConfig
from support.kv_options import kv_config


def test_sizes_are_bytes_and_auto_is_none():
    config = KVConfig(
        memory="3MiB", swap_space="1KiB", offload=OffloadConfig(kv_memory=7), scratch="1kB"
    )

    assert (config.memory, config.swap_space, config.offload.kv_memory) == (3 << 20, 1024, 7)
    assert (config.scratch, config.prefix_cache.disk_memory) == (1000, 0)
    assert KVConfig().memory is None
    assert ServerConfig(max_body="1MiB").max_body == 1 << 20


def test_fractions_are_numbers_and_auto_is_none():
    config = OffloadConfig(recompute="0.5", cpu_attention="off")

    assert (config.recompute, config.cpu_attention) == (0.5, 0.0)
    assert OffloadConfig(recompute=0.25).recompute == 0.25
    assert OffloadConfig().recompute is OffloadConfig().cpu_attention is None


def test_activation_codec_is_parsed_on_construction():
    assert OffloadConfig().activation_codec is None
    assert OffloadConfig(activation_codec="int8").activation_codec == codec_spec("int8")


def test_config_can_be_replaced_with_parsed_values():
    config = KVConfig(
        memory="3MiB",
        offload=OffloadConfig(recompute="0.5", activation_codec="int8"),
        swap_space="1KiB",
    )

    assert replace(config.offload, recompute=None).activation_codec == codec_spec("int8")
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


def test_prefix_cache_is_enabled_without_a_disk_tier_by_default():
    assert KVConfig().prefix_cache == PrefixCacheConfig(enabled=True, disk_memory=0)
