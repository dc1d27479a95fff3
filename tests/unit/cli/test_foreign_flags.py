"""Flags of other engines: the error names what to use instead."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quire.cli import command
from quire.cli.main import app
from quire.cli.options import SECTIONS, options_of


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("serve quire-tiny --gpu-memory-utilization 0.9", "use --kv-memory"),
        ("serve quire-tiny --pipeline_parallel_size=2", "use --tensor-parallel-size"),
        ("serve quire-tiny --enable-auto-tool-choice", "not needed: requests with `tools`"),
        ("generate quire-tiny x --quantization awq", "use --weight-codec for weights"),
        ("generate quire-tiny x --max-new-tokens 5", "use --max-tokens"),
        ("generate quire-tiny x --ctx-size 512", "use --max-model-len"),
        ("serve quire-tiny --model-path x", "the model is the first argument"),
        ("serve quire-tiny -ngl 9", "unknown option '-ngl': use --weights-memory"),
        ("serve quire-tiny -np 4", "unknown option '-np': use --max-num-seqs"),
        ("serve quire-tiny -c 4096", "unknown option '-c': use --max-model-len"),
    ],
)
def test_flag_of_another_engine_is_refused_with_the_alternative(command: str, hint: str) -> None:
    result = CliRunner().invoke(app, command.split())

    assert result.exit_code == 2
    assert hint in result.stderr
    assert "did you mean" not in result.stderr


def test_every_named_alternative_is_a_flag_of_quire() -> None:
    known = {found.flag for found in options_of(SECTIONS)} | {
        "no-enable-prefix-caching",
        "no-cuda-graphs",
    }
    named = {
        word.strip(".,:;()").removeprefix("--")
        for flag in command.FLAGS
        for word in (command.instead_of(flag) or "").split()
        if word.startswith("--")
    }

    assert named
    assert named <= known


def test_no_listed_flag_exists_in_serve_or_generate() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    declared = {
        name.removeprefix("--")
        for command in ("serve", "generate")
        for parameter in commands[command].params
        for name in parameter.opts
    }

    assert declared.isdisjoint(command.FLAGS)


def test_every_flag_of_the_page_on_other_engines_exists_or_has_a_hint() -> None:
    page = Path(__file__).parents[3] / "docs/guides/from-other-engines.md"
    tables = page.read_text(encoding="utf-8").partition("## Request fields")[0]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| ")]
    flags = {flag for cell in cells for flag in re.findall(r"`(-[\w-]+)", cell)}
    declared = {f"--{name}" for found in options_of(SECTIONS) for name in (found.flag,)}
    commands = get_command(app).commands  # type: ignore[attr-defined]
    declared |= {name for parameter in commands["serve"].params for name in parameter.opts}
    declared |= {
        name for parameter in commands["serve"].params for name in parameter.secondary_opts
    }

    assert len(flags) > 40
    assert {flag for flag in flags - declared if command.instead_of(flag) is None} == set()
