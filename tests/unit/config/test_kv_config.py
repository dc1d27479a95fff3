"""Sizes, fractions and codecs of a KV memory are parsed once, when it is configured."""

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


def test_the_codec_of_activations_is_found_once():
    assert OffloadConfig().activation_codec is None
    assert OffloadConfig(activation_codec="int8").activation_codec == codec_spec("int8")


def test_a_config_can_be_made_of_what_another_holds():
    config = KVConfig(
        memory="3MiB",
        offload=OffloadConfig(recompute="0.5", activation_codec="int8"),
        swap_space="1KiB",
    )

    assert replace(config.offload, recompute=None).activation_codec == codec_spec("int8")
    assert replace(config, codec="int8", memory=config.memory).memory == config.memory
    assert replace(config) == config


def test_a_config_becomes_json_values():
    values = option_values(KVConfig(memory="1KiB", offload=OffloadConfig(activation_codec="int8")))

    assert (values["memory"], values["offload"]["activation_codec"]) == (1024, "int8")
    assert values["offload"]["recompute"] is None
    assert values["prefix_cache"]["enabled"] is True


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"memory": "lots"}, ConfigError, "--kv-memory: 'lots' is not a size: .*, or auto"),
        ({"memory": 1.5}, ConfigError, "--kv-memory: 1.5 is not a size"),
        ({"swap_space": None}, ConfigError, "--swap-space: None is not a size"),
        ({"scratch": True}, ConfigError, "--scratch: True is not a size"),
        ({"offload_recompute": "2"}, ConfigError, "--kv-offload-recompute: expected auto, off or"),
        ({"offload_recompute": True}, ConfigError, "a fraction from 0 to 1, got True"),
        ({"offload_cpu_attention": "nan"}, ConfigError, "got 'nan'"),
        ({"offload_activation_codec": "int9"}, UnknownName, "unknown codec 'int9'"),
        ({"offload_activation_codec": "int4_page"}, ConfigError, "encodes single tokens"),
        ({"offload_activation_codec": 8}, ConfigError, "--kv-offload-activation-codec: expected"),
    ],
)
def test_what_cannot_be_parsed_is_refused_by_the_name_of_its_option(options, error, said):
    with pytest.raises(error, match=said):
        kv_config(**options)


@pytest.mark.parametrize("options", [{"offload": {"kv_memory": 1}}, {"prefix_cache": False}])
def test_a_config_in_a_config_is_one(options):
    [name] = options
    with pytest.raises(ConfigError, match=f"expected {name} to be .*Config, got"):
        KVConfig(**options)


def test_recompute_and_cpu_attention_share_what_is_offloaded():
    with pytest.raises(ConfigError, match="of at most 1, got"):
        OffloadConfig(recompute=0.5, cpu_attention=0.6)


def test_the_prefix_cache_is_on_and_in_the_kv_memory_alone_by_default():
    assert KVConfig().prefix_cache == PrefixCacheConfig(enabled=True, disk_memory=0)
