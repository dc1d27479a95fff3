"""`quire`: the command line. Commands import heavy modules when they run, not for `--help`."""

import atexit
import inspect
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from quire.cli.batch import batch
from quire.cli.bench import add_to as add_bench_commands
from quire.cli.board import board
from quire.cli.calibrate import calibrate
from quire.cli.chat import chat
from quire.cli.command import UsageError, register, usage_error_text
from quire.cli.demo import demo
from quire.cli.doctor import doctor
from quire.cli.evaluate import eval_app
from quire.cli.generate import generate
from quire.cli.listings import codecs, policies
from quire.cli.models import models, pull
from quire.cli.options import Section, keyword, option_parameter
from quire.cli.plan import plan
from quire.cli.profile import profile
from quire.cli.serve import serve
from quire.cli.settings import VERBOSE_KEY, with_parameters
from quire.cli.simulate import simulate
from quire.cli.tune import tune
from quire.errors import QuireError
from quire.layout.options import option
from quire.version import __version__

ERROR_EXIT = 2
INTERRUPT_EXIT = 130  # 128 + SIGINT, the convention of shells
CLOSED_PIPE_EXIT = 141  # 128 + SIGPIPE


class QuireGroup(TyperGroup):
    """Converts expected exceptions to one line of text and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            _refuse_usage(error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of the pipe has closed it; click exits silently
            raise
        except UsageError as error:
            _refuse_usage(error)
            raise
        except (QuireError, OSError, MemoryError) as error:
            if ctx.meta.get(VERBOSE_KEY):
                traceback.print_exc()
            typer.echo(f"error: {error_text(error)}", err=True)
            raise typer.Exit(ERROR_EXIT) from error
        except KeyboardInterrupt as interrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPT_EXIT) from interrupt


def _refuse_usage(error: Any) -> None:
    """Report an invalid command line on one line; click prints the help of a group."""
    if type(error).__name__ != "NoArgsIsHelpError":
        typer.echo(f"error: {usage_error_text(error)}", err=True)
        raise typer.Exit(ERROR_EXIT) from error


def error_text(error: QuireError | OSError | MemoryError) -> str:
    """One-line description of an error."""
    if isinstance(error, QuireError):
        return str(error)
    if isinstance(error, MemoryError):
        what = str(error) or "out of memory"
        return f"this command needs more memory than is available: {what}; use smaller sizes"
    where = "standard output, a file or a socket" if error.filename is None else error.filename
    return f"{where} cannot be used: {error.strerror or error}; use another one, or free disk space"


app = typer.Typer(
    name="quire",
    cls=QuireGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    *(generate, chat, batch, serve, plan, profile, calibrate, tune, board, simulate, demo, doctor),
    *(pull, models, policies, codecs),
)
for _command in _COMMANDS:
    register(app, _command)
app.add_typer(eval_app, name="eval")
bench_app = typer.Typer(no_args_is_help=True, help="Measure throughput and latency.")
add_bench_commands(bench_app)
app.add_typer(bench_app, name="bench")


def _show_version(value: bool) -> None:  # noqa: FBT001 - click calls it
    if value:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFlags:
    """Options before the command."""

    version: bool = option(False, help="Show the version.", common=True)
    verbose: bool = option(False, help="Show tracebacks.", synonyms=("v",), common=True)


def _options(ctx: Any, **given: Any) -> None:
    """Run large language models in a KV memory of fixed size."""
    ctx.meta[VERBOSE_KEY] = given[_verbose.parameter]


_version, _verbose = Section("", "", ProgramFlags).options()
_PARAMETERS = [
    keyword("ctx", typer.Context, inspect.Parameter.empty),
    option_parameter(_version, _show_version),
    option_parameter(_verbose),
]
app.callback()(with_parameters(_options, _options, _PARAMETERS))


def run() -> None:
    """The entry point `quire`."""
    # outputs may contain characters that the terminal's encoding cannot represent
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except SystemExit as done:
        # click and rich end with 1 if the reader of a pipe has closed it
        closed = isinstance(done.__context__, BrokenPipeError)
        _end_at_once(CLOSED_PIPE_EXIT if closed else done.code)
        raise


def _end_at_once(code: object) -> None:
    """End the process without destroying its modules, which takes 0.2 s after PyTorch's import.

    Exit handlers run and streams are flushed. With a running thread that is not a daemon, or
    without a numeric exit code, the interpreter ends as usual.
    """
    main = threading.main_thread()
    others = [one for one in threading.enumerate() if one is not main and not one.daemon]
    if others or not isinstance(code, int | None):
        return
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the reader has ended: nothing to report
        code = CLOSED_PIPE_EXIT
    except OSError:  # the interpreter reports it
        return
    os._exit(code or 0)
