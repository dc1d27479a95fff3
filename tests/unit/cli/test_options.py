"""Options come from the config dataclasses, with their help and defaults."""

from dataclasses import fields

import pytest

from quire.cli.options import (
    KV,
    MODEL,
    SAMPLING,
    SCHEDULE,
    SECTIONS,
    documented_attributes,
    options_of,
)
from quire.config.kv_config import KVConfig
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
    assert [found.name for found in section.options()] == [field.name for field in fields(config)]


def test_defaults_are_those_of_the_fields():
    for section in SECTIONS:
        plain = section.config()
        for found in section.options():
            parsed = type(plain)(**{found.name: found.default})
            assert getattr(parsed, found.name) == getattr(plain, found.name)


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

    assert sized == {"memory", "swap_space", "offload_memory", "disk_memory", "scratch"}


def test_help_of_sampling_options_is_that_of_their_docstring():
    documented = documented_attributes(SamplingParams.__doc__)

    assert documented["min_p"].startswith("drop tokens under this share")
    assert documented["min_p"].endswith("None: the model's, else 0.")
    assert list(documented) == [field.name for field in fields(SamplingParams)]


def test_a_docstring_without_attributes_documents_nothing():
    assert documented_attributes("One line.") == {}
