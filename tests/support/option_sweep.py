"""Every option of every command with absurd values: only one-line errors are allowed.

`python tests/support/option_sweep.py [COMMAND ...]` runs each value of each option in a process of
its own and prints what is not a one-line error, a refusal by the parser, or a run. It takes an
hour; `tests/cli/test_option_sweep.py` runs a sample.
"""

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from quire.cli.main import app, run

VALUES = ("0", "-1", "100000000000", "nan", "inf", "1e400", "", "9" * 400, "9" * 5_000)
OWN_ERROR, PARSER_ERROR = "error: ", "Usage: "
LIMIT_S = 30.0
_MEMORY_BYTES = 14 << 30  # a machine that grants everything would hide what asks for too much


def commands() -> dict[str, Any]:
    """All commands by name."""
    return dict(_leaves(get_command(app), ()))


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, inner in command.commands.items():
        yield from _leaves(inner, (*path, name))


def options_of(command: Any) -> list[str]:
    """Options of a command that take a value."""
    options = [p for p in command.params if p.param_type_name == "option"]
    return [p.opts[0] for p in options if not p.is_flag]


def arguments_of(name: str, folder: Path) -> list[str]:
    """Arguments of a short run of a command that needs no other option.

    Args:
        name: of the command.
        folder: for its files.
    """
    lines, trace = folder / "in.jsonl", folder / "trace.jsonl"
    lines.write_text('{"prompt": "a"}\n', encoding="utf-8")
    trace.write_text(
        '{"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}\n',
        encoding="utf-8",
    )
    model = ["--kv-memory=2MiB", "--threads=1", "--no-verify"]
    engine = [*model, "--max-tokens=2"]
    own = {
        "generate": ["quire-tiny", "a", *engine],
        "chat": engine,
        "batch": ["quire-tiny", str(lines), str(folder / "out.jsonl"), "--overwrite", *engine],
        "serve": ["--port=0", *model],
        "eval gate": ["--quick", "--threads=1"],
        "simulate": ["quire-tiny", f"--trace={trace}"],
        "calibrate": ["quire-tiny", "--tokens=64", f"--output={folder}"],
        "profile": ["--quick", "--threads=1"],
        "demo": ["--requests=1", "--max-tokens=2"],
    }
    quick = [p.opts[0] for p in commands()[name].params if p.opts[0] == "--quick"]
    return [*name.split(), *own.get(name, quick)]


def problem(code: int | None, stderr: str) -> str | None:
    """What is wrong with the end of a command; None if it is correct.

    Args:
        code: its exit code, negative for a signal; None if it ran until the limit.
        stderr: what it wrote to standard error.
    """
    if "Traceback" in stderr:
        return stderr.strip().splitlines()[-1]
    if code in (None, 0, 1) or (code == 2 and PARSER_ERROR in stderr):
        return None
    lines = stderr.strip().splitlines()
    if code == 2 and lines and lines[-1].startswith(OWN_ERROR) and len(lines[-1]) > len(OWN_ERROR):
        return None
    return f"exit code {code}: {stderr[-300:]!r}"


def run_apart(arguments: list[str], limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """Exit code and standard error of a command line in a forked process."""
    with tempfile.TemporaryFile("w+") as stderr:
        child = os.fork()
        if child == 0:
            _become_quire(arguments, stderr.fileno())
        code, end_s = None, time.monotonic() + limit_s
        while code is None and time.monotonic() < end_s:
            time.sleep(0.02)
            ended, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        stderr.seek(0)
        return code, stderr.read()


def _become_quire(arguments: list[str], stderr: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, source in ((0, nothing), (1, nothing), (2, stderr)):
        os.dup2(source, descriptor)
    sys.argv, status = ["quire", *arguments], 99
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 98
    finally:
        if status == 99:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(status)


def main(names: list[str]) -> int:
    """Sweep over some commands, or all; the number of problems."""
    import quire.api.llm  # noqa: F401 - once, not in every child

    found, known = 0, commands()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in names or known:
            for option in options_of(known[name]):
                for value in VALUES:
                    arguments = [*arguments_of(name, Path(folder)), f"{option}={value}"]
                    wrong = problem(*run_apart(arguments))
                    if wrong is not None:
                        found += 1
                        sys.stdout.write(f"{name} {option}={value!r}: {wrong}\n")
                        sys.stdout.flush()
    return found


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
