"""`--help` and `--help-all`: names, choices and values are never cut."""

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quire.cli.main import app

COMMANDS = sorted(get_command(app).commands.keys() - {"eval", "bench"})


def help_of(command: str, flag: str, width: int) -> str:
    result = CliRunner().invoke(app, [command, flag], env={"COLUMNS": str(width)})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("width", [60, 160])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_name_whole_within_the_terminal(command, flag, width):
    shown = help_of(command, flag, width)

    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    for parameter in get_command(app).commands[command].params:
        if flag == "--help-all" or not getattr(parameter, "hidden", False):
            names = [*parameter.opts, *parameter.secondary_opts]
            if parameter.param_type_name == "argument":
                names = [parameter.metavar]
            assert all(name in shown for name in names), names


def test_help_shows_values_defaults_and_the_help_option():
    shown = help_of("generate", "--help", 80)

    assert "Usage: quire generate [OPTIONS] [MODEL] [PROMPT]" in shown
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in shown
    assert "[default: --enable-prefix-caching]" in shown
    assert "--dtype [auto|float32|bfloat16|float16]" in shown
    assert "--help, -h" in shown
    assert "<bool>" not in shown  # flags have no value


def test_wide_help_has_names_and_help_on_one_line():
    lines = help_of("generate", "--help", 160).splitlines()

    assert any("--max-num-seqs" in line and "Maximum number of seq" in line for line in lines)


def test_help_marks_required_arguments_without_braces():
    shown = help_of("batch", "--help", 80)

    assert "Usage: quire batch [OPTIONS] MODEL INPUT OUTPUT" in shown
    assert "INPUT (required)" in shown
