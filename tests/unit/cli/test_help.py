import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import quire.config.kv_config as kv_config
import quire.scheduler.schedule_config as schedule_config
from quire.cli import command, completion
from quire.cli.main import app
from quire.cli.options import MODEL, SECTIONS, SERVER, Dtype, options_of
from quire.kernels.select import BACKENDS
from quire.layout.codec_names import codec_pair
from quire.layout.config import DTYPE_BYTES
from quire.policies.registry import registered, registered_budgets
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
    return re.findall(r"^│[ *]{1,4}(--[a-z][a-z-]*)", text, re.MULTILINE)


@pytest.mark.parametrize("command", list(commands()))
def test_help_is_short_and_reports_the_number_of_hidden_options(command):
    some, every = flags(shown(command, "--help")), flags(shown(command, "--help-all"))

    assert len(some) <= MAX_OPTIONS
    assert set(some) <= set(every)
    more = len(every) - len(some)
    options = "option" if more == 1 else "options"
    assert (f"--help-all shows {more} more {options}." in shown(command, "--help")) == bool(more)


@pytest.mark.parametrize("command", ["tune", "board"])
def test_help_says_what_an_automatic_memory_is_or_that_a_search_needs_a_size(command):
    words = " ".join(shown(command, "--help").replace("│", " ").split())
    text = words.partition("--kv-memory SIZE ")[2].partition(" --swap-space")[0]

    assert {"--evict", "--kv-codec"}.isdisjoint(flags(shown(command, "--help-all")))
    assert "or auto (the free memory of the device; quire tune and quire board need a size)" in text
    assert "default" not in text
    assert "--threads" in flags(shown(command, "--help"))
    words = " ".join(shown("simulate", "--help").replace("│", " ").split())
    assert "a size such as 64MiB, or auto (all requests of the trace fit at once)" in words
    assert "free memory of the device" not in words


@pytest.mark.parametrize("command", COMMON)
def test_help_all_lists_every_engine_option(command):
    listed = flags(shown(command, "--help-all"))

    sections = tuple(s for s in SECTIONS if s.name in ("model", "kv", "schedule"))
    assert {f"--{found.flag}" for found in options_of(sections)} <= set(listed)
    assert "--threads" in flags(shown(command, "--help"))


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
    for device in ("cuda:0", "cuda:12", "cpu", "auto", "cuda"):  # no choices: it has an index
        assert MODEL.config(device=device).device == device


def test_help_shows_options_in_groups():
    text = shown("serve", "--help")

    for title in ("Model", "KV memory", "Offloading", "Prefix caching", "Scheduling", "Server"):
        assert f"─ {title} ─" in text
    assert "─ Sampling ─" not in text
    every = shown("serve", "--help-all")
    for title in {found.group for found in SERVER.options()}:
        assert f"─ {title} ─" in every


TOP_COMMANDS = sorted(get_command(app).commands.keys() - {"eval", "bench"})


def help_of(command: str, flag: str, width: int) -> str:
    result = CliRunner().invoke(app, [command, flag], env={"COLUMNS": str(width)})
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("width", [60, 160])
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
@pytest.mark.parametrize("command", TOP_COMMANDS)
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
    lines = help_of("generate", "--help", 160).splitlines()
    assert any("--max-num-seqs" in line and "Maximum number of seq" in line for line in lines)
    shown = help_of("batch", "--help", 80)
    assert "Usage: quire batch [OPTIONS] MODEL INPUT OUTPUT" in shown
    assert "INPUT (required)" in shown


def test_completed_names_are_the_registered_ones_with_a_cap():
    assert completion.policy_names() == ["full", *registered()]
    assert completion.budget_names() == list(registered_budgets())
    for name in completion.codec_names():
        if name != "none":
            codec_pair(name)
    assert completion.complete_rule("h2") == ["h2o:cap=", "h2o_sinks:cap="]
    assert completion.complete_rule("fu") == ["full"]
    assert completion.complete_policy("pyr") == ["pyramid"]
    assert completion.complete_codec("kiv") == ["kivi4", "kivi2"]
    assert completion.complete_codec("int8/int4_h") == ["int8/int4_hadamard"]


def test_models_are_completed_from_folders(tmp_path, monkeypatch):
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "config.json").write_text("{}")
    (tmp_path / "models" / "tiny.gguf").write_bytes(b"GGUF")
    (tmp_path / "models" / "notes.txt").write_text("")
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)

    assert completion.complete_model("") == ["quire-tiny", "smollm2", "models/"]
    assert completion.complete_model("models/") == ["models/llama", "models/tiny.gguf"]
    assert completion.complete_model(f"{tmp_path}/models/l") == [f"{tmp_path}/models/llama"]
    assert completion.complete_model("nowhere/") == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("quire generate --evict ", "h2o:cap="),
        ("quire generate quire-tiny x --kv-codec int8", "int8_channel"),
        *(("quire policies tov", "tova"), ("quire generate --dtype ", "bfloat16")),
        *(("quire serve qui", "quire-tiny"), ("quire ", "generate")),
    ],
)
def test_shell_completion_yields_values_without_importing_torch(words, expected):
    code = (
        "import sys; sys.argv = ['quire']\n"
        "from quire.cli.main import run\n"
        "try:\n    run()\n"
        "finally:\n    assert not {'torch', 'transformers'} & sys.modules.keys(), 'heavy'\n"
    )
    given = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = os.environ | {"_QUIRE_COMPLETE": "complete_bash"} | given
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert expected in found.stdout.split(), found.stderr
    assert "heavy" not in found.stderr


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
        ("serve quire-tiny -c 4096", "unknown option '-c': use --max-model-len"),
    ],
)
def test_flag_of_another_engine_is_refused_with_the_alternative(command: str, hint: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2
    assert hint in result.stderr
    assert "did you mean" not in result.stderr


def test_flags_of_other_engines_are_none_of_quire_and_have_hints():
    known = {found.flag for found in options_of(SECTIONS)}
    known |= {"no-enable-prefix-caching", "no-cuda-graphs"}
    hints = " ".join(command.instead_of(flag) or "" for flag in command.FLAGS)
    named = {word.strip(".,:;()")[2:] for word in hints.split() if word.startswith("--")}
    declared = get_command(app).commands  # type: ignore[attr-defined]
    params = (*declared["serve"].params, *declared["generate"].params)

    assert named
    assert named <= known
    assert {name[2:] for one in params for name in one.opts}.isdisjoint(command.FLAGS)

    page = Path(__file__).parents[3] / "docs/guides/from-other-engines.md"
    tables = page.read_text(encoding="utf-8").partition("## Request fields")[0]
    cells = [line.split("|")[1] for line in tables.splitlines() if line.startswith("| ")]
    flags = {flag for cell in cells for flag in re.findall(r"`(-[\w-]+)", cell)}
    serve = get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    declared = {f"--{found.flag}" for found in options_of(SECTIONS)}
    declared |= {name for one in serve for name in (*one.opts, *one.secondary_opts)}

    assert len(flags) > 40
    assert {flag for flag in flags - declared if command.instead_of(flag) is None} == set()
