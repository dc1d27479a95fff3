"""The TOML file of `--config`: names, tables, types and refusals."""

from pathlib import Path

import pytest

from quire.cli.options import read_config_file
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnknownName


@pytest.fixture
def read(tmp_path: Path):
    def read_text(text: str):
        path = tmp_path / "quire.toml"
        path.write_text(text)
        return read_config_file(path)

    return read_text


@pytest.mark.parametrize(
    "text",
    [
        "kv-memory = '3MiB'\nmax-num-batched-tokens = 7\nseed = 5",
        "kv_memory = '3MiB'\nmax_num_batched_tokens = 7\nseed = 5",
        "[kv]\nmemory = '3MiB'\n[schedule]\nmax_num_batched_tokens = 7\n[sampling]\nseed = 5",
        "[kv]\nkv-memory = '3MiB'\n[schedule]\nmax-num-batched-tokens = 7\n[sampling]\nseed = 5",
    ],
)
def test_option_names_are_flat_or_in_tables_with_dashes_or_underscores(read, text):
    assert read(text) == (
        None,
        {"kv_memory": "3MiB", "schedule_max_num_batched_tokens": 7, "sampling_seed": 5},
    )


@pytest.mark.parametrize(
    "text",
    [
        "kv-offload-memory = '1GiB'\nenable-prefix-caching = false",
        "[kv]\nkv-offload-memory = '1GiB'\nenable_prefix_caching = false",
        "[kv.offload]\nkv_memory = '1GiB'\n[kv.prefix_cache]\nenabled = false",
        "[kv.offload]\nkv-memory = '1GiB'\n[kv.prefix-cache]\nenable-prefix-caching = false",
    ],
)
def test_nested_config_options_are_read_from_their_table_or_flag_name(read, text):
    expected = {"kv_offload_kv_memory": "1GiB", "kv_prefix_cache_enabled": False}
    assert read(text) == (None, expected)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("[kv]\nenabled = true", "enable_prefix_caching"),
        ("[kv.ofload]\nkv_memory = 1", "offload"),
        ("[kv.offload]\nkv_memry = 1", "kv_memory"),
    ],
)
def test_unknown_name_in_a_nested_table_suggests_the_nearest(read, text, nearest):
    with pytest.raises(UnknownName, match=nearest):
        read(text)


def test_model_name_is_read_from_the_top_level(read):
    assert read("model = 'some/folder'") == ("some/folder", {})
    assert read("[model]\ndtype = 'float32'") == (None, {"model_dtype": "float32"})


def test_model_name_is_read_from_the_model_table(read):
    assert read("[model]\nname = 'some/folder'\ndtype = 'float32'") == (
        "some/folder",
        {"model_dtype": "float32"},
    )


@pytest.mark.parametrize("text", ["model = 3", "[model]\nname = 3"])
def test_model_that_is_not_a_string_is_refused(read, text):
    with pytest.raises(ConfigError, match="must be a string, got 3"):
        read(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("kv-memry = 1", "kv_memory"),
        ("[kv]\nmemry = 1", "memory"),
        ("[smpling]\nseed = 1", "sampling"),
        ("memory = 1", "kv_memory"),
    ],
)
def test_unknown_name_suggests_the_nearest(read, text, nearest):
    with pytest.raises(UnknownName, match=nearest):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "kv-memory = 1.5",
        "kv-memory = true",
        "max-num-batched-tokens = '7'",
        "max-num-batched-tokens = 7.0",
        "max-num-batched-tokens = true",
        "temperature = 'warm'",
        "verify = 1",
        "dtype = 32",
        "stop = [1]",
        "stop = 1",
    ],
)
def test_value_of_wrong_type_is_refused_with_its_name(read, text):
    with pytest.raises(ConfigError, match=text.split(" ")[0]):
        read(text)


def test_integer_for_a_float_and_single_stop_string_are_accepted(read):
    _, values = read("temperature = 1\nstop = 'x'\nkv-memory = 4096")

    assert values == {"sampling_temperature": 1, "sampling_stop": "x", "kv_memory": 4096}


def test_duplicate_option_is_refused(read):
    with pytest.raises(ConfigError, match="twice"):
        read("kv-memory = 1\n[kv]\nmemory = 2")


def test_invalid_toml_is_refused(read):
    with pytest.raises(ConfigError, match="not TOML"):
        read("kv-memory: 1")


@pytest.mark.parametrize("value", ["9" * 5_000, "0x" + "f" * 5_000, "-" + "9" * 400, str(2**64)])
@pytest.mark.parametrize("key", ["port", "kv.offload.kv_memory", "shutdown-timeout", "stop"])
def test_integer_over_64_bits_is_refused(read, key, value):
    text = f"{key} = [['x', {{a = {value}}}]]" if key == "stop" else f"{key} = {value}"
    with pytest.raises(ConfigError, match=rf"{key}\S* as an integer|more than 4,300 digits"):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = " + "[" * 5_000, "nested too deeply"),
        ("a = " + "{a=" * 5_000, "nested too deeply"),
        (".".join("a" * 5_000) + " = 1", "unknown option"),
        (r"host = 'a'" + "\nmodel = 'b\0'", "not TOML"),
        ('chat-template = "a\\u0000"', "chat-template without NUL"),
        ("kv-memory = nan", "'kv-memory' must be a number of bytes"),
        ("port = 1979-05-27", "'port' must be an integer"),
        ('model = "\\ud800"', "not TOML"),
    ],
)
def test_other_unusable_values_are_refused(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_file_that_is_not_utf_8_is_refused(tmp_path: Path):
    path = tmp_path / "quire.toml"
    for content in (b"model = '\xff'", "port = 1".encode("utf-16"), b"model = '\xed\xa0\x80'"):
        path.write_bytes(content)

        with pytest.raises(ConfigError, match="not TOML"):
            read_config_file(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "nowhere.toml")


def test_small_size_without_a_unit_is_refused(read):
    _, values = read("kv-memory = 4")

    assert values == {"kv_memory": "4"}
    with pytest.raises(ConfigError, match="expected a size with its unit, got '4'"):
        KVConfig(memory=values["kv_memory"])
