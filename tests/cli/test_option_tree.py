"""Every option of every command is a field of a config dataclass: flag, TOML key and help text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from quire.cli.chat import CHAT_SAMPLING
from quire.cli.command import HelpFlags
from quire.cli.main import ProgramFlags, app
from quire.cli.options import (
    SECTIONS,
    SIMULATED_KV,
    OptionField,
    Section,
    command_sections,
    options_of,
    read_config_file,
)
from quire.cli.settings import SharedFlags
from quire.errors import ConfigError

OF_TYPER = {"--install-completion", "--show-completion"}
ROOT = Path(__file__).parents[2]
CHANGED = {("chat",): [CHAT_SAMPLING], ("simulate",): [SIMULATED_KV]}  # sections with own texts
SHARED = tuple(Section("", "", flags) for flags in (SharedFlags, HelpFlags, ProgramFlags))
OWN = command_sections()
IN_FILE = [(s, found) for s in OWN if s.in_file for found in s.options() if found.flag != "config"]


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*words, name))


def declared_for(words: tuple[str, ...]) -> dict[tuple[str, ...], list[OptionField]]:
    """Options that a command may have, by their names on the command line."""
    own = tuple(section for section in OWN if section.name == "_".join(words))
    found: dict[tuple[str, ...], list[OptionField]] = {}
    for each in options_of((*SECTIONS, *SHARED, *own)):
        short = (f"-{name}" if len(name) <= 2 else f"--{name}" for name in each.synonyms)
        found.setdefault((f"--{each.flag}", *short), []).append(each)
    return found


@pytest.mark.parametrize(
    ("words", "command"),
    [*commands(get_command(app))],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_every_option_in_the_command_tree_is_declared_as_a_field(words, command):
    declared = declared_for(words)
    for parameter in command.params:
        if parameter.param_type_name == "option" and not OF_TYPER.intersection(parameter.opts):
            found = declared[tuple(parameter.opts)]
            changed = [each for section in CHANGED.get(words, ()) for each in section.options()]
            both = (each for each in (*found, *changed) if each.parameter == parameter.name)
            texts = [each.help for each in both]
            assert any(_same(parameter.help, text) for text in texts)


def _same(shown: str, declared: str) -> bool:
    """Whether a text of `--help` is a declared one, as a sentence."""
    return shown.removesuffix(" Can be repeated.").lower() == declared.rstrip(".").lower() + "."


def test_options_are_created_in_one_place():
    """No command calls `typer.Option`; `option_parameter` makes all options from fields."""
    sources = (ROOT / "src/quire").rglob("*.py")
    found = [path.name for path in sources if "typer.Option(" in path.read_text(encoding="utf-8")]
    assert found == ["options.py"]


@pytest.mark.parametrize(
    ("section", "found"), IN_FILE, ids=[f"{s.name}-{found.flag}" for s, found in IN_FILE]
)
def test_option_of_a_command_is_a_key_of_its_table(tmp_path, section, found):
    values = {bool: True, int: 64, float: 0.5, str: "text", Path: "file"}
    value = values.get(found.kind, ["text"])
    path = tmp_path / "options.toml"
    for key in {found.flag, found.name}:
        path.write_text(f"[{section.name}]\n{key} = {json.dumps(value)}\n")

        _, read = read_config_file(path)

        assert read == {found.parameter: Path("file") if found.kind is Path else value}


def test_value_of_a_table_is_checked_and_a_flag_precedes_it(quire, tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("[batch]\nprompt-key = 3\n")
    with pytest.raises(ConfigError, match="'prompt-key' must be a string, got 3"):
        read_config_file(path)
    path.write_text("[bench_latency]\nbatch-size = 0\n")

    refused = quire("bench", "latency", "--config", path)

    assert refused.exit_code == 2
    assert "expected batch-size of 1 or more, got 0" in refused.stderr
    path.write_text('[demo]\nkv-memory = "8MiB"\n')
    refused = quire("demo", "quire-tiny", "--config", path, "--kv-memory", "65KiBit")
    assert "65KiBit" in refused.stderr
