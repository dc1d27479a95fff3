from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.main import app
from quire.cli.options import (
    KV,
    MODEL,
    SCHEDULE,
    SECTIONS,
    SERVER,
    command_sections,
    configs_of,
    documented_attributes,
    options_of,
    read_config_file,
)
from quire.cli.settings import Settings, with_settings
from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError, UnknownName
from quire.scheduler.schedule_config import ScheduleConfig


@pytest.mark.parametrize("found", options_of(SECTIONS), ids=lambda found: found.flag)
def test_every_option_has_a_flag_of_its_own_help_and_a_supported_type(found):
    assert len(found.help) > 10
    assert "\n" not in found.help
    assert [found.flag] == [one.flag for one in options_of(SECTIONS) if one.flag == found.flag]
    assert found.kind in (str, int, float, bool, list[str])


def test_help_of_every_time_in_seconds_states_the_unit():
    found = [
        field.metadata["option"]
        for section in (*SECTIONS, *command_sections())
        for _, config in configs_of(section)
        for field in fields(config)
        if "option" in field.metadata
    ]

    times = [option.help for option in found if option.unit in ("s", "seconds")]
    assert len(times) >= 10
    assert [text for text in times if "in seconds" not in text] == []


@pytest.mark.parametrize(("section", "config"), [(KV, KVConfig), (SCHEDULE, ScheduleConfig)])
def test_every_engine_config_field_is_an_option(section, config):
    inside = dict(configs_of(section))
    listed = [found.path for found in section.options()]

    for names, held in inside.items():
        plain = {f.name for f in fields(held) if (*names, f.name) not in inside}
        assert {path[-1] for path in listed if path[:-1] == names[1:]} == plain
    assert inside[section.name,] is config


def test_defaults_and_help_of_options_are_those_of_fields():
    for section in SECTIONS:
        plain = section.config()
        for found in section.options():
            assert section.build({found.path: found.default}) == plain
    documented = documented_attributes(SamplingParams.__doc__)
    assert documented["min_p"].startswith("exclude tokens below this fraction")
    assert documented["min_p"].endswith("None: the model's, else 0.")
    assert list(documented) == [field.name for field in fields(SamplingParams)]
    assert documented_attributes("One line.") == {}


def test_options_are_named_by_metadata_fields_or_other_servers_and_built_by_path():
    flags = {found.name: found.flag for found in options_of((MODEL, KV))}
    named = {"memory": "kv-memory", "page_tokens": "block-size"}
    assert flags.items() >= (named | {"trust_remote_code": "trust-remote-code"}).items()
    sized = {found.name for found in options_of((KV,)) if found.sized}

    names = "memory swap_space kv_memory cpu_memory disk_memory remote_memory scratch"
    assert sized == {*names.split(), "state_checkpoint_memory"}

    [found] = [option for option in SERVER.options() if option.flag == "tool-parser"]
    assert found.synonyms == ("tool-call-parser",)

    refused = CliRunner().invoke(app, ["serve", "quire-tiny", "--tool-call-parser", "hermess"])

    assert "hermes" in refused.output

    paths = {found.flag: found.path for found in options_of((KV,))}
    values = {paths["kv-offload-recompute"]: "0.5", paths["enable-prefix-caching"]: False}

    config = KV.build(values | {paths["swap-space"]: "1KiB"})

    offload = OffloadConfig(recompute=0.5)
    prefix_cache = PrefixCacheConfig(enabled=False)
    assert config == KVConfig(swap_space=1024, offload=offload, prefix_cache=prefix_cache)


@pytest.fixture
def read(tmp_path: Path):
    def read_text(text: str):
        path = tmp_path / "quire.toml"
        path.write_text(text)
        return read_config_file(path)

    return read_text


def test_option_names_are_flat_or_in_tables_with_dashes_or_underscores(read):
    expected = {"kv_memory": "3MiB", "schedule_max_num_batched_tokens": 7, "sampling_seed": 5}
    for text in (
        "kv-memory = '3MiB'\nmax-num-batched-tokens = 7\nseed = 5",
        "[kv]\nkv-memory = '3MiB'\n[schedule]\nmax-num-batched-tokens = 7\n[sampling]\nseed = 5",
        "[kv]\nmemory = '3MiB'\n[schedule]\nmax-num-batched-tokens = 7\n[sampling]\nseed = 5",
    ):
        assert read(text) == (None, expected)
        underscores = text.replace("batched-tokens", "batched_tokens").replace("max-num", "max_num")
        assert read(underscores.replace("kv-memory", "kv_memory")) == (None, expected)
    prefix_cache = "enable-prefix-caching = false"
    for nested in (
        f"kv-offload-memory = '1GiB'\n{prefix_cache}",
        f"[kv]\nkv-offload-memory = '1GiB'\n{prefix_cache.replace('-', '_')}",
        "[kv.offload]\nkv_memory = '1GiB'\n[kv.prefix_cache]\nenabled = false",
        f"[kv.offload]\nkv-memory = '1GiB'\n[kv.prefix-cache]\n{prefix_cache}",
    ):
        expected = {"kv_offload_kv_memory": "1GiB", "kv_prefix_cache_enabled": False}
        assert read(nested) == (None, expected)


def test_model_names_integers_for_floats_and_single_stop_strings_are_read(read):
    assert read("model = 'some/folder'") == ("some/folder", {})
    dtype = {"model_dtype": "float32"}
    assert read("[model]\ndtype = 'float32'") == (None, dtype)
    assert read("[model]\nname = 'some/folder'\ndtype = 'float32'") == ("some/folder", dtype)

    _, values = read("temperature = 1\nstop = 'x'\nkv-memory = 4096")
    assert values == {"sampling_temperature": 1, "sampling_stop": "x", "kv_memory": 4096}
    _, values = read("kv-memory = 4")
    assert values == {"kv_memory": "4"}
    with pytest.raises(ConfigError, match="expected a size with its unit, got '4'"):
        KVConfig(memory=values["kv_memory"])


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        *(("kv-memry = 1", "kv_memory"), ("[kv]\nmemry = 1", "memory")),
        *(("[smpling]\nseed = 1", "sampling"), ("memory = 1", "kv_memory")),
        ("[kv]\nenabled = true", "enable_prefix_caching"),
        ("[kv.ofload]\nkv_memory = 1", "offload"),
        ("[kv.offload]\nkv_memry = 1", "kv_memory"),
    ],
)
def test_unknown_name_suggests_the_nearest(read, text, nearest):
    with pytest.raises(UnknownName, match=nearest):
        read(text)


@pytest.mark.parametrize("value", ["9" * 5_000, "0x" + "f" * 5_000, "-" + "9" * 400, str(2**64)])
@pytest.mark.parametrize("key", ["port", "kv.offload.kv_memory", "shutdown-timeout", "stop"])
def test_integer_over_64_bits_is_refused(read, key, value):
    text = f"{key} = [['x', {{a = {value}}}]]" if key == "stop" else f"{key} = {value}"
    with pytest.raises(ConfigError, match=rf"{key}\S* as an integer|more than 4,300 digits"):
        read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "must be a string, got 3"),
        ("[model]\nname = 3", "must be a string, got 3"),
        *((f"kv-memory = {value}", "kv-memory") for value in ("1.5", "true")),
        *((f"max-num-seqs = {value}", "max-num-seqs") for value in ("'7'", "7.0", "true")),
        *(
            ("temperature = 'warm'", "temperature"),
            ("verify = 1", "verify"),
            ("dtype = 32", "dtype"),
        ),
        *((f"stop = {value}", "stop") for value in ("[1]", "1")),
        ("kv-memory = 1\n[kv]\nmemory = 2", "twice"),
        ("kv-memory: 1", "not TOML"),
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
def test_unusable_values_are_refused_with_their_name(read, text, message):
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_file_that_is_missing_or_not_utf_8_is_refused(tmp_path: Path):
    path = tmp_path / "quire.toml"
    for content in (b"model = '\xff'", "port = 1".encode("utf-16"), b"model = '\xed\xa0\x80'"):
        path.write_bytes(content)

        with pytest.raises(ConfigError, match="not TOML"):
            read_config_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "nowhere.toml")


seen: list[tuple[Settings, str | None]] = []


@with_settings(defaults={"max-tokens": 40, "threads": 1})
def show(
    settings: Settings, *, extra: Annotated[str | None, typer.Option(help="Its own.")] = None
) -> None:
    seen.append((settings, extra))


@with_settings(MODEL, KV)
def show_fewer(settings: Settings) -> None:
    seen.append((settings, None))


def run(command, *arguments: str):
    app = typer.Typer()
    app.command()(command)
    seen.clear()
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def settings_of(command, *arguments: str) -> Settings:
    result = run(command, *arguments)
    assert result.exit_code == 0, result.output
    return seen[-1][0]


@pytest.fixture
def toml(tmp_path: Path) -> str:
    path = tmp_path / "quire.toml"
    path.write_text(
        "model = 'from-file'\nkv-memory = '3MiB'\nverify = false\n"
        "[sampling]\nmax-tokens = 7\nstop = ['a', 'b']\n"
    )
    return str(path)


def test_settings_are_defaults_unless_a_file_and_options_override_them(toml: str):
    settings = settings_of(show)
    assert settings.model == "quire-tiny"
    assert settings.kv.memory is None
    assert settings.loading.verify
    assert settings.sampling.temperature is None
    assert settings.sampling.stop == ()
    assert (settings.sampling.max_tokens, settings.loading.threads) == (40, 1)

    settings = settings_of(show, "--config", toml)

    assert settings.model == "from-file"
    assert settings.kv.memory == 3 << 20
    assert not settings.loading.verify
    assert (settings.sampling.max_tokens, settings.sampling.stop) == (7, ("a", "b"))

    settings = settings_of(
        show, "mine", "--config", toml, "--kv-memory", "auto", "--verify", "--max-tokens", "40",
        "--stop", "c",
    )  # fmt: skip

    assert settings.model == "mine"
    assert settings.kv.memory is None
    assert settings.loading.verify
    assert (settings.sampling.max_tokens, settings.sampling.stop) == (40, ("c",))

    run(show, "--extra", "here")
    assert seen[-1][1] == "here"
    assert settings_of(show_fewer, "m", "--kv-memory", "1MiB").model == "m"
    assert run(show_fewer, "--max-tokens", "3").exit_code == 2
    assert settings_of(show_fewer, "--config", toml).kv.memory == 3 << 20


@pytest.mark.parametrize(
    ("option", "values", "error"),
    [
        ("--temperature", ("nan", "-1"), RequestError),
        *(("--top-p", ("0",), RequestError), ("--max-tokens", ("-1", "0"), RequestError)),
        *(("--stop", ("",), RequestError), ("--block-size", ("0",), ConfigError)),
        *(("--max-num-seqs", ("0",), ConfigError), ("--low-watermark", ("nan",), ConfigError)),
    ],
)
def test_value_out_of_range_is_refused_before_loading(option, values, error):
    for value in values:
        with pytest.raises(error):
            run(show, option, value)
        assert not seen


def test_tenants_without_default_are_refused():
    found = settings_of(show, "--kv-memory", "2MiB", "--seed", "3").as_dict()  # JSON values
    assert (found["kv"]["memory"], found["sampling"]["seed"]) == (2 << 20, 3)
    settings_of(show, "--tenants", "a; default:weight=2").refuse_other_tenants()
    settings_of(show).refuse_other_tenants()

    with pytest.raises(ConfigError, match="--tenants names a, b: add 'default', or"):
        settings_of(show, "--tenants", "a;b").refuse_other_tenants()
