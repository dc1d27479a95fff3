"""Settings of a command: the command line overrides the config file, the file the defaults."""

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
def show(
    settings: Settings, *, extra: Annotated[str | None, typer.Option(help="Its own.")] = None
) -> None:
    """Record the settings."""
    seen.append((settings, extra))


@with_settings(MODEL, KV)
def show_fewer(settings: Settings) -> None:
    """Record fewer settings."""
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


def test_settings_without_arguments_are_the_defaults():
    settings = settings_of(show)

    assert settings.model == "quire-tiny"
    assert settings.kv.memory is None
    assert settings.loading.verify
    assert settings.sampling.temperature is None
    assert settings.sampling.stop == ()


def test_command_overrides_defaults():
    settings = settings_of(show)

    assert (settings.sampling.max_tokens, settings.loading.threads) == (40, 1)


def test_config_file_overrides_defaults(toml: str):
    settings = settings_of(show, "--config", toml)

    assert settings.model == "from-file"
    assert settings.kv.memory == 3 << 20
    assert not settings.loading.verify
    assert (settings.sampling.max_tokens, settings.sampling.stop) == (7, ("a", "b"))


def test_command_line_overrides_the_file_even_with_a_default_value(toml: str):
    settings = settings_of(
        show, "mine", "--config", toml, "--kv-memory", "auto", "--verify", "--max-tokens", "40",
        "--stop", "c",
    )  # fmt: skip

    assert settings.model == "mine"
    assert settings.kv.memory is None
    assert settings.loading.verify
    assert (settings.sampling.max_tokens, settings.sampling.stop) == (40, ("c",))


def test_command_receives_its_own_options():
    run(show, "--extra", "here")

    assert seen[-1][1] == "here"


def test_command_accepts_only_its_sections():
    assert settings_of(show_fewer, "m", "--kv-memory", "1MiB").model == "m"
    assert run(show_fewer, "--max-tokens", "3").exit_code == 2


def test_config_file_options_of_other_sections_are_ignored(toml: str):
    assert settings_of(show_fewer, "--config", toml).kv.memory == 3 << 20


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
def test_value_out_of_range_is_refused_before_loading(arguments, error):
    with pytest.raises(error):
        run(show, *arguments)
    assert not seen


def test_settings_as_dict_has_json_values():
    settings = settings_of(show, "--kv-memory", "2MiB", "--seed", "3")

    assert settings.as_dict()["kv"]["memory"] == 2 << 20
    assert settings.as_dict()["sampling"]["seed"] == 3


def test_tenants_without_default_are_refused():
    settings_of(show, "--tenants", "a; default:weight=2").refuse_other_tenants()
    settings_of(show).refuse_other_tenants()

    with pytest.raises(ConfigError, match="--tenants names a, b: add 'default', or"):
        settings_of(show, "--tenants", "a;b").refuse_other_tenants()
