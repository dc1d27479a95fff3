"""Command line over file over defaults, as a command sees it."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from quire.cli.options import KV, MODEL
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError, RequestError

seen: list[tuple[Settings, str | None]] = []


@with_settings(defaults={"max-tokens": 40, "threads": 1})
def look(
    settings: Settings, *, extra: Annotated[str | None, typer.Option(help="Its own.")] = None
) -> None:
    """Look at the settings."""
    seen.append((settings, extra))


@with_settings(MODEL, KV)
def look_at_less(settings: Settings) -> None:
    """Look at fewer settings."""
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


def test_without_arguments_the_defaults_stand():
    settings = settings_of(look)

    assert settings.model == "quire-tiny"
    assert settings.kv.memory is None
    assert settings.loading.verify
    assert settings.sampling.temperature is None
    assert settings.sampling.stop == ()


def test_a_command_has_its_own_defaults():
    settings = settings_of(look)

    assert (settings.sampling.max_tokens, settings.loading.threads) == (40, 1)


def test_the_file_wins_over_the_defaults(toml: str):
    settings = settings_of(look, "--config", toml)

    assert settings.model == "from-file"
    assert settings.kv.memory == 3 << 20
    assert not settings.loading.verify
    assert (settings.sampling.max_tokens, settings.sampling.stop) == (7, ("a", "b"))


def test_the_command_line_wins_over_the_file_even_with_the_default_value(toml: str):
    settings = settings_of(
        look, "mine", "--config", toml, "--kv-memory", "auto", "--verify", "--max-tokens", "40",
        "--stop", "c",
    )  # fmt: skip

    assert settings.model == "mine"
    assert settings.kv.memory is None
    assert settings.loading.verify
    assert (settings.sampling.max_tokens, settings.sampling.stop) == (40, ("c",))


def test_a_commands_own_options_come_to_it():
    run(look, "--extra", "here")

    assert seen[-1][1] == "here"


def test_a_command_takes_only_the_sections_it_names():
    assert settings_of(look_at_less, "m", "--kv-memory", "1MiB").model == "m"
    assert run(look_at_less, "--max-tokens", "3").exit_code == 2


def test_options_of_sections_a_command_lacks_are_left_alone_in_the_file(toml: str):
    assert settings_of(look_at_less, "--config", toml).kv.memory == 3 << 20


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--temperature", "nan"], RequestError),
        (["--temperature", "-1"], RequestError),
        (["--top-p", "0"], RequestError),
        (["--max-tokens", "-1"], RequestError),
        (["--max-tokens", "0"], RequestError),
        (["--stop", ""], RequestError),
        (["--block-size", "0"], ConfigError),
        (["--max-num-seqs", "0"], ConfigError),
        (["--low-watermark", "nan"], ConfigError),
    ],
)
def test_a_value_out_of_range_is_refused_before_anything_is_loaded(arguments, error):
    with pytest.raises(error):
        run(look, *arguments)
    assert not seen


def test_negative_threads_are_refused():
    with pytest.raises(ConfigError, match="threads"):
        settings_of(look, "--threads", "-1").set_threads()


def test_settings_become_json_values_without_loss():
    settings = settings_of(look, "--kv-memory", "2MiB", "--seed", "3")

    assert settings.as_dict()["kv"]["memory"] == 2 << 20
    assert settings.as_dict()["sampling"]["seed"] == 3


def test_tenants_none_of_which_a_command_could_ask_for_are_refused():
    settings_of(look, "--tenants", "a; default:weight=2").refuse_other_tenants()
    settings_of(look).refuse_other_tenants()

    with pytest.raises(ConfigError, match="--tenants names a, b: add 'default', or"):
        settings_of(look, "--tenants", "a;b").refuse_other_tenants()
