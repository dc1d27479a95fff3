"""Options come from the config dataclasses, with their help and defaults."""

from dataclasses import fields

import pytest

from quire.cli.options import (
    KV,
    MODEL,
    SAMPLING,
    SCHEDULE,
    SECTIONS,
    configs_of,
    documented_attributes,
    options_of,
)
from quire.config.kv_config import KVConfig, OffloadConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.scheduler.schedule_config import ScheduleConfig


@pytest.mark.parametrize("found", options_of(SECTIONS), ids=lambda found: found.flag)
def test_every_option_has_help_and_a_kind_the_command_line_can_read(found):
    assert len(found.help) > 10
    assert "\n" not in found.help
    assert found.kind in (str, int, float, bool, list[str])


def test_no_two_options_share_a_flag():
    flags = [found.flag for found in options_of(SECTIONS)]

    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize(("section", "config"), [(KV, KVConfig), (SCHEDULE, ScheduleConfig)])
def test_every_field_of_the_engines_configs_is_an_option(section, config):
    inside = dict(configs_of(section))
    listed = [found.path for found in section.options()]

    for names, held in inside.items():
        plain = {f.name for f in fields(held) if (*names, f.name) not in inside}
        assert {path[-1] for path in listed if path[:-1] == names[1:]} == plain
    assert inside[section.name,] is config


def test_defaults_are_those_of_the_fields():
    for section in SECTIONS:
        plain = section.config()
        for found in section.options():
            assert section.build({found.path: found.default}) == plain


def test_a_command_may_have_a_default_of_its_own():
    own = {found.flag: found.default for found in options_of((SAMPLING,), {"max-tokens": 99})}

    assert own["max-tokens"] == 99
    assert own["min-tokens"] == 0


def test_flags_follow_the_metadata_and_else_the_field():
    flags = {found.name: found.flag for found in options_of((MODEL, KV))}

    assert flags["memory"] == "kv-memory"
    assert flags["page_tokens"] == "block-size"
    assert flags["trust_remote_code"] == "trust-remote-code"


def test_a_size_may_be_a_number_or_a_text():
    sized = {found.name for found in options_of((KV,)) if found.sized}

    assert sized == {"memory", "swap_space", "kv_memory", "disk_memory", "scratch"}


def test_configs_in_a_config_are_built_of_the_paths_of_their_options():
    paths = {found.flag: found.path for found in options_of((KV,))}
    values = {paths["kv-offload-recompute"]: "0.5", paths["enable-prefix-caching"]: False}

    config = KV.build(values | {paths["swap-space"]: "1KiB"})

    offload = OffloadConfig(recompute=0.5)
    prefix_cache = PrefixCacheConfig(enabled=False)
    assert config == KVConfig(swap_space=1024, offload=offload, prefix_cache=prefix_cache)


def test_help_of_sampling_options_is_that_of_their_docstring():
    documented = documented_attributes(SamplingParams.__doc__)

    assert documented["min_p"].startswith("exclude tokens below this fraction")
    assert documented["min_p"].endswith("None: the model's, else 0.")
    assert list(documented) == [field.name for field in fields(SamplingParams)]


def test_a_docstring_without_attributes_documents_nothing():
    assert documented_attributes("One line.") == {}
