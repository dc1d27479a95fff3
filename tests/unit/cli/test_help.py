"""`--help` shows the common options of a command in groups, `--help-all` all options."""

import re
from collections.abc import Iterator
from typing import get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import quire.config.kv_config as kv_config
import quire.scheduler.schedule_config as schedule_config
from quire.cli.main import app
from quire.cli.options import MODEL, SECTIONS, SERVER, Dtype, options_of
from quire.kernels.select import BACKENDS
from quire.layout.config import DTYPE_BYTES
from quire.scheduler.admission import AUTO as AUTO_ADMISSION
from quire.scheduler.admission import RULES
from quire.sim.machine import PEAKS, PROFILE, MachineName
from quire.sim.traces.base import AUTO, TraceName
from quire.sim.traces.formats import FORMATS

MAX_OPTIONS = 25
COMMON = ("generate", "batch", "serve", "eval run", "bench throughput")
"""Commands that take every option of the engine."""


def commands(command: object = None, words: tuple[str, ...] = ()) -> Iterator[str]:
    command = get_command(app) if command is None else command
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from commands(child, (*words, name))
    if not children:
        yield " ".join(words)


def shown(command: str, flag: str) -> str:
    result = CliRunner(env={"COLUMNS": "160", "TERM": "dumb"}).invoke(app, [*command.split(), flag])
    assert result.exit_code == 0, result.output
    return result.output


def flags(text: str) -> list[str]:
    """The first flag of every row."""
    return re.findall(r"^│[ *]{1,4}(--[a-z][a-z-]*)", text, re.MULTILINE)


@pytest.mark.parametrize("command", list(commands()))
def test_help_is_short_and_reports_the_number_of_hidden_options(command):
    some, every = flags(shown(command, "--help")), flags(shown(command, "--help-all"))

    assert len(some) <= MAX_OPTIONS
    assert set(some) <= set(every)
    more = len(every) - len(some)
    options = "option" if more == 1 else "options"
    assert (f"--help-all shows {more} more {options}." in shown(command, "--help")) == bool(more)


def test_options_that_a_search_chooses_are_not_in_its_help():
    for command in ("tune", "board"):
        assert {"--evict", "--kv-codec"}.isdisjoint(flags(shown(command, "--help-all")))


@pytest.mark.parametrize("command", ["tune", "board"])
def test_help_of_the_kv_memory_says_where_a_size_is_required(command):
    words = " ".join(shown(command, "--help").replace("│", " ").split())
    text = words.partition("--kv-memory SIZE ")[2].partition(" --swap-space")[0]

    assert "or auto (the free memory of the device; quire tune and quire board need a size)" in text
    assert "default" not in text


def test_help_of_a_simulation_says_what_its_automatic_memory_is():
    words = " ".join(shown("simulate", "--help").replace("│", " ").split())

    assert "a size such as 64MiB, or auto (all requests of the trace fit at once)" in words
    assert "free memory of the device" not in words


@pytest.mark.parametrize("command", [*COMMON, "chat", "tune", "board"])
def test_help_names_the_number_of_threads(command):
    assert "--threads" in flags(shown(command, "--help"))


@pytest.mark.parametrize("command", COMMON)
def test_help_all_lists_every_engine_option(command):
    listed = flags(shown(command, "--help-all"))

    sections = tuple(s for s in SECTIONS if s.name in ("model", "kv", "schedule"))
    assert {f"--{found.flag}" for found in options_of(sections)} <= set(listed)


@pytest.mark.parametrize("found", [o for o in options_of(SECTIONS) if o.choices])
def test_choices_are_shown_and_an_invalid_value_suggests_the_nearest(found):
    simulated = dict.fromkeys(("trace", "machine", "cluster", "router"), "simulate")
    command = (simulated | dict.fromkeys(("server", "ray"), "serve")).get(found.section, "generate")

    text = " ".join(re.sub(r"[│\s]+", " ", shown(command, "--help-all")).split())
    assert f"[{'|'.join(found.choices)}]" in text.replace("| ", "|")
    wrong = f"{found.choices[-1]}x"
    required = ["--trace", "t"] if command == "simulate" else []
    result = CliRunner().invoke(app, [command, *required, f"--{found.flag}", wrong])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: expected {found.flag} to be one of {found.choices[0]}")
    assert f"got {wrong!r}: did you mean {found.choices[-1]}" in result.stderr


@pytest.mark.parametrize(
    ("choices", "registered"),
    [
        (Dtype, {"auto", *DTYPE_BYTES}),
        (kv_config.AttentionName, {"auto", *BACKENDS}),
        (schedule_config.Admission, {AUTO_ADMISSION, *RULES}),
        (MachineName, {AUTO, *PEAKS, PROFILE}),
        (TraceName, {AUTO, *FORMATS}),
    ],
)
def test_choices_are_the_registered_names(choices, registered):
    assert set(get_args(choices)) == set(registered)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:12", "cpu", "auto", "cuda"])
def test_device_can_have_an_index(device):
    assert MODEL.config(device=device).device == device


def test_help_shows_options_in_groups():
    text = shown("serve", "--help")

    for title in ("Model", "KV memory", "Offloading", "Prefix caching", "Scheduling", "Server"):
        assert f"─ {title} ─" in text
    assert "─ Sampling ─" not in text
    every = shown("serve", "--help-all")
    for title in {found.group for found in SERVER.options()}:
        assert f"─ {title} ─" in every
