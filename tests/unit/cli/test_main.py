import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import quire.cli.main as cli
from quire.errors import QuireError
from quire.version import __version__

COMMANDS = "generate chat batch serve plan demo doctor policies codecs profile simulate eval bench"


def quire(*arguments: str, **options):
    return CliRunner().invoke(cli.app, list(arguments), **options)


@pytest.fixture
def failing(monkeypatch):
    def fail_with(error: BaseException) -> None:
        def fail(self: object) -> None:
            raise error

        monkeypatch.setattr("quire.cli.settings.Settings.open_llm", fail)

    return fail_with


def np_error() -> MemoryError:
    try:
        np.empty(1 << 55)
    except MemoryError as error:
        return error
    raise AssertionError("this machine has 256 PiB of memory")


@pytest.mark.slow
def test_help_names_every_command_and_loads_no_tensor_library():
    result = quire("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS.split())
    group = quire("bench").output  # a group without a command shows its help
    assert "Usage" in group
    assert "error:" not in group
    heavy = {"torch", "transformers", "numpy", "fastapi", "uvicorn", "pydantic"}
    code = f"import sys, quire.cli.main; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments",
    [("-v", "generate", "-p", "x"), ("generate", "-p", "x", "-v"), ("bench", "latency", "-v")],
)
def test_verbose_shows_the_traceback(failing, arguments):
    failing(QuireError("the request is refused"))

    result = quire(*arguments)

    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("error: the request is refused\n")


def test_interrupt_exits_with_130_and_a_fault_is_not_caught(failing):
    failing(KeyboardInterrupt())

    result = quire("generate", "--prompt", "x")

    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    failing(ZeroDivisionError("a bug"))
    assert isinstance(quire("generate", "--prompt", "x").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (QuireError("the request is refused"), "error: the request is refused\n"),
        (OSError(28, "No space left on device"), "standard output, a file or a socket cannot be"),
        (OSError(28, "No space left on device", "out.csv"), "out.csv cannot be used: No space"),
        (MemoryError(), "needs more memory than is available: out of memory"),
        (np_error(), "needs more memory than is available: Unable to allocate"),
    ],
)
def test_error_is_one_line_on_standard_error(failing, error, message):
    failing(error)

    result = quire("generate", "--prompt", "x")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_standard_output_is_one_error_line():
    code = "from quire.cli.main import run; run()"
    with Path("/dev/full").open("w") as full:
        line = [sys.executable, "-c", code, "codecs"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: standard output, a file or a socket cannot be used: No")


def test_an_interrupt_during_the_imports_is_one_line():
    code = """
import sys
from quire.__main__ import run

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "quire.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "command",
    ["generate", "chat", "serve", "plan", "calibrate", "profile", "eval-run", "bench-throughput"],
)
def test_empty_model_name_is_refused(failing, command):
    failing(AssertionError("a model was loaded"))
    prompt = ("-p", "x") if command == "generate" else ()

    result = quire(*command.split("-"), " " if prompt else "", *prompt)

    assert result.exit_code == 2
    assert result.stderr.startswith("error: expected a model folder, a hub name or quire-tiny, got")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("threads", ["100000", "-1", "99999999999"])
@pytest.mark.parametrize(
    "command", [("generate", "-p", "x"), ("calibrate", "quire-tiny"), ("bench", "throughput")]
)
def test_thread_count_out_of_range_is_refused(command, threads):
    result = quire(*command, "--threads", threads)

    assert result.exit_code == 2
    if threads != "-1" or command[0] == "generate":
        assert result.stderr.startswith("error: expected --threads from 0 (PyTorch's default")


def test_the_entry_point_is_installed_and_shows_the_version():
    assert quire("--version").stdout == f"quire {__version__}\n"
    script = Path(sys.executable).with_name("quire")
    if not script.is_file():
        pytest.skip("quire is not installed here as a script")

    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)

    assert done.stdout == f"quire {__version__}\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate quire-tiny x --block-size 1k", "--block-size to be a valid integer, got '1k'"),
        ("generate quire-tiny x --block-size", "option '--block-size' requires an argument"),
        ("generate quire-tiny x --no-verify=3", "does not take a value"),
        ("generate quire-tiny x --max-tokns 5", "'--max-tokns': did you mean --max-tokens"),
        ("generate quire-tiny x y z", "(y z); expected quire generate [OPTIONS] [MODEL] [PROMPT]"),
        ("calibrate quire-tiny --tokens 5", "--tokens to be greater than or equal to 64, got '5'"),
        ("simulate", "expected --trace, which quire simulate requires"),
        ("bench latncy", "no such command 'latncy'. Did you mean 'latency'"),
        ("bacth", "no such command 'bacth'. Did you mean 'batch', 'bench'? Expected quire "),
        ("genrate", "no such command 'genrate'. Did you mean 'generate'? Expected quire "),
        ("--colour", "unknown option '--colour'; see quire --help"),
    ],
)
def test_invalid_command_line_prints_one_error_line(line, message):
    result = quire(*line.split())
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert result.output.count("\n") == 1
    assert message in result.output


@pytest.mark.parametrize("size", ["4", "1023"])
@pytest.mark.parametrize("option", ["--swap-space", "--kv-memory", "--weights-memory"])
def test_small_size_without_a_unit_is_refused_with_a_hint(option, size):
    result = quire("generate", "quire-tiny", "x", option, size)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {option}: expected a size with its unit, got '{size}'")
    assert f"write {size}GiB" in result.output


@pytest.mark.parametrize("size", ["4", "-1GiB", "nan"])
@pytest.mark.parametrize(
    "name",
    ["memory", "kv-memory", "weights-memory", "disk-kv-memory", "headroom", "activation-peak"],
)
def test_invalid_size_is_refused_with_its_option_name(name, size):
    result = quire("plan", f"--{name}", size)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: --{name}: ")
    assert f"'{size}'" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["policies"], ["plan", "quire-tiny"]])
def test_closed_pipe_ends_the_command_silently(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        line = [sys.executable, "-m", "quire", *arguments]
        done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_wrong_values_and_missing_arguments_name_their_flag_and_a_remedy(tmp_path):
    for option, value, expected in (
        ("--max-tokens", "-1", "max_tokens must be an integer in [0, 2147483647]"),
        ("--top-p", "3", "top_p must be"),
    ):
        result = quire("generate", "quire-tiny", "x", option, value)
        assert result.exit_code == 2
        assert f"error: {option}: {expected}" in result.output
        assert "change the value, or leave the option out" in result.output
    assert "(--block-size)" in quire("generate", "quire-tiny", "x", "--block-size", "0").output
    assert "--block-size" in quire("plan", "quire-tiny", "--kv-memory", "4KiB").output
    (tmp_path / "config.json").write_text("{}")
    result = quire("plan", str(tmp_path / "config.json"))
    assert (result.exit_code, "it is a file, not a model folder" in result.output) == (2, True)

    (tmp_path / "in.jsonl").write_text("{}")
    for folder in (".", "/"):
        result = quire("batch", "quire-tiny", str(tmp_path / "in.jsonl"), folder)
        assert result.exit_code == 2
        assert result.output.startswith("error: expected a file for the records, got")
    for model in ("quire-tiny", str(tmp_path)):
        assert "OUTPUT is missing" in quire("batch", model, "in.jsonl").output
