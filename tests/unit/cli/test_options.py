"""Command-line options are derived from the config dataclasses, with help and defaults."""

from dataclasses import fields

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.cli.options import (
    KV,
    MODEL,
    SAMPLING,
    SCHEDULE,
    SECTIONS,
    SERVER,
    command_sections,
    configs_of,
    documented_attributes,
    options_of,
)
from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.scheduler.schedule_config import ScheduleConfig


@pytest.mark.parametrize("found", options_of(SECTIONS), ids=lambda found: found.flag)
def test_every_option_has_help_and_a_supported_type(found):
    assert len(found.help) > 10
    assert "\n" not in found.help
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


def test_no_two_options_share_a_flag():
    flags = [found.flag for found in options_of(SECTIONS)]

    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(("section", "config"), [(KV, KVConfig), (SCHEDULE, ScheduleConfig)])
def test_every_engine_config_field_is_an_option(section, config):
    inside = dict(configs_of(section))
    listed = [found.path for found in section.options()]

    for names, held in inside.items():
        plain = {f.name for f in fields(held) if (*names, f.name) not in inside}
        assert {path[-1] for path in listed if path[:-1] == names[1:]} == plain
    assert inside[section.name,] is config


def test_option_defaults_are_the_field_defaults():
    for section in SECTIONS:
        plain = section.config()
        for found in section.options():
            assert section.build({found.path: found.default}) == plain


def test_command_can_override_a_default():
    own = {found.flag: found.default for found in options_of((SAMPLING,), {"max-tokens": 99})}

    assert own["max-tokens"] == 99
    assert own["min-tokens"] == 0


def test_flag_is_taken_from_metadata_or_the_field_name():
    flags = {found.name: found.flag for found in options_of((MODEL, KV))}

    assert flags["memory"] == "kv-memory"
    assert flags["page_tokens"] == "block-size"
    assert flags["trust_remote_code"] == "trust-remote-code"


def test_size_options_are_marked():
    sized = {found.name for found in options_of((KV,)) if found.sized}

    assert sized == {"memory", "swap_space", "kv_memory", "cpu_memory", "disk_memory"} | {
        "remote_memory",
        "scratch",
        "state_checkpoint_memory",
    }


def test_nested_configs_are_built_from_option_paths():
    paths = {found.flag: found.path for found in options_of((KV,))}
    values = {paths["kv-offload-recompute"]: "0.5", paths["enable-prefix-caching"]: False}

    config = KV.build(values | {paths["swap-space"]: "1KiB"})

    offload = OffloadConfig(recompute=0.5)
    prefix_cache = PrefixCacheConfig(enabled=False)
    assert config == KVConfig(swap_space=1024, offload=offload, prefix_cache=prefix_cache)


def test_sampling_option_help_is_the_docstring():
    documented = documented_attributes(SamplingParams.__doc__)

    assert documented["min_p"].startswith("exclude tokens below this fraction")
    assert documented["min_p"].endswith("None: the model's, else 0.")
    assert list(documented) == [field.name for field in fields(SamplingParams)]


def test_docstring_without_attributes_gives_no_help():
    assert documented_attributes("One line.") == {}


def test_option_has_the_names_of_other_servers():
    [found] = [option for option in SERVER.options() if option.flag == "tool-parser"]
    assert found.synonyms == ("tool-call-parser",)

    refused = CliRunner().invoke(app, ["serve", "quire-tiny", "--tool-call-parser", "hermess"])

    assert "hermes" in refused.output
