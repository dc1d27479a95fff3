"""Registration of commands: help texts, `--help-all`, and checks of positional arguments.

Rare options are declared without `common=True`: only `--help-all` shows them.

Help cuts no name or value at any width of the terminal: a wide terminal shows names and help side
by side, a narrow one the help below the names.
"""

import inspect
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, get_args, no_type_check

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from quire.cli.options import Section, option_parameter, read_config_file
from quire.cli.report import json_only
from quire.errors import ConfigError, nearest
from quire.layout.options import option
from quire.layout.packaged import NAMES, PACKAGED_MODEL

Command = Callable[..., None]
UsageError: Any = typer.BadParameter.__base__
"""Click's exception for an invalid command line, which typer does not export."""


class QuireCommand(TyperCommand):
    """A command that explains missing or misplaced arguments with an example."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._refuse_model_option(ctx, args)
        written = [*args]  # click removes what it has parsed
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param not in self._arguments() or error.message:
                raise
            model = self._model_of_file(ctx)
            if model is not None:
                return super().parse_args(ctx, [model, *written])
            raise ConfigError(self._missing(ctx)) from error
        except UsageError as error:
            if hasattr(error, "option_name"):
                error.option_name = short_flag(error.option_name, written)
            error.ctx, error.cmd = ctx, self  # not set in the error of an option without its value
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; the formatter of click is not used."""
        console = Console(highlight=False)
        usage = " ".join(self.get_usage(ctx).split()[1:]).translate(_WITHOUT_BRACES)
        console.print(Padding(Text.assemble(("Usage: ", "bold yellow"), (usage, "bold")), (1, 1)))
        for paragraph in (self.help or "").split("\n\n"):
            console.print(Padding(Text(paragraph.strip()), (0, 1, 1, 1)))
        for title, parameters in _groups(self.get_params(ctx)).items():
            rows = [(_names(p, ctx), _help(p)) for p in parameters]
            stacked = Group(*_lines(rows, console.width - _FRAME))
            body = _side_by_side(rows) if console.width >= _SIDE_BY_SIDE else stacked
            console.print(Panel(body, title=title, title_align="left", border_style="dim"))
        if self.epilog:
            console.print(Padding(Text(self.epilog), (1, 1)))

    def _refuse_model_option(self, ctx: Any, args: list[str]) -> None:
        declared = {name for parameter in self.params for name in parameter.opts}
        if not any(parameter.name == "model" for parameter in self._arguments()):
            return
        options = args[: args.index("--")] if "--" in args else args
        for text in options:
            name = text.partition("=")[0]
            if name in ("--model", "-m") and name not in declared:
                raise ConfigError(
                    f"{name} is not an option: the model is the first argument, as in "
                    f"{self._usage(ctx)}"
                )

    def _model_of_file(self, ctx: Any) -> str | None:
        """The model of --config, if the arguments lack only a required MODEL."""
        file, arguments = ctx.params.get("config"), self._arguments()
        given = [ctx.params.get(parameter.name) for parameter in arguments]
        if file is None or arguments[0].name != "model" or given.count(None) != 1:
            return None
        return read_config_file(file)[0] if arguments[0].required else None

    def _missing(self, ctx: Any) -> str:
        """Error text for a missing argument; in most cases the model is missing."""
        values = [ctx.params.get(parameter.name) for parameter in self._arguments()]
        given = shlex.join(str(value) for value in values if value is not None)
        if len(given) == 0 or values.count(None) > 1:
            return f"expected {self._usage(ctx)}, got {given or 'no arguments'}"
        if values[0] in NAMES or Path(str(values[0])).is_dir():
            missing = self._arguments()[values.index(None)].metavar
            return f"expected {self._usage(ctx)}, got {given}: {missing} is missing"
        return (
            f"expected {self._usage(ctx)}, got {given}: name the model first, as in "
            f"{ctx.command_path} {PACKAGED_MODEL} {given}"
        )

    def _usage(self, ctx: Any) -> str:
        return " ".join([ctx.command_path, *(str(p.metavar) for p in self._arguments())])

    def _arguments(self) -> list[Any]:
        return [p for p in self.params if p.param_type_name == "argument"]


def usage_error_text(error: Any) -> str:
    """One-line description of an invalid command line."""
    parameter = getattr(error, "param", None)
    if parameter is not None:
        return _parameter_error(error, parameter)
    flag = "--help-all" if isinstance(error.cmd, QuireCommand) else "--help"
    see = f"see {error.ctx.command_path} {flag}"
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        known = [name for parameter in error.cmd.params for name in parameter.opts]
        instead = instead_of(error.option_name)
        if instead is not None:
            return f"unknown option {error.option_name!r}: {instead}; {see}"
        near = nearest(error.option_name, known)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        return f"unknown option {error.option_name!r}{hint}; {see}"
    usage = " ".join(error.ctx.get_usage().split()[1:])  # the first word is "Usage:"
    message = _one_line(error.format_message())
    closed = f"{message}? Expected" if "Did you mean" in message else f"{message}; expected"
    return f"{closed} {usage}, {see}"


def _parameter_error(error: Any, parameter: Any) -> str:
    """Describe a missing option or argument, or an invalid value."""
    name = next((flag for flag in parameter.opts if flag.startswith("--")), parameter.metavar)
    if not error.message:
        command = error.ctx.command_path
        return f"expected {name}, which {command} requires; see {command} --help"
    # errors of pydantic, which parses the values
    wrong: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    got = f", got {wrong[0]['input']!r}" if wrong else ""
    expected = error.message.removeprefix("Input should be ").partition(",")[0]
    if got and error.message.startswith("Input should be "):
        return f"expected {name} to be {expected}{got}"
    return f"{name}: {_one_line(error.message)}{got}"


def _one_line(text: str) -> str:
    text = " ".join(text.split()).rstrip(".?")
    return text[:1].lower() + text[1:]


def register(app: typer.Typer, command: Command, name: str | None = None) -> None:
    """Add a command to a program or a group."""
    signature = inspect.signature(command)
    hidden = sum(_is_hidden(parameter) for parameter in signature.parameters.values())

    @wraps(command)
    def run(**given: Any) -> None:
        given.pop(_HELP_ALL.name)
        with json_only(enabled=any(v for name, v in given.items() if name.endswith("as_json"))):
            command(**given)

    parameters = [*signature.parameters.values(), _HELP_ALL]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    add = app.command(
        name,
        cls=QuireCommand,
        help=reflowed(command.__doc__ or ""),
        epilog=f"--help-all shows {hidden} more option{'s' if hidden > 1 else ''}."
        if hidden
        else None,
    )
    add(run)


def _is_hidden(parameter: inspect.Parameter) -> bool:
    return any(getattr(info, "hidden", False) for info in get_args(parameter.annotation)[1:])


@no_type_check  # the argument is click's Context; typer.Context is only a marker
def _show_all(ctx: typer.Context, value: bool) -> None:  # noqa: FBT001 - click calls it
    if not value:
        return
    for parameter in ctx.command.params:
        parameter.hidden = False
    ctx.command.epilog = None
    typer.echo(ctx.get_help())
    raise typer.Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpFlags:
    """Options that show help."""

    help_all: bool = option(False, help="Show all options and exit.", common=True)


[_HELP_ALL] = (option_parameter(found, _show_all) for found in Section("", "", HelpFlags).options())


def reflowed(docstring: str) -> str:
    """Join the lines of each paragraph of a docstring, so that `--help` can wrap them."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


_SIDE_BY_SIDE = 120  # columns of the terminal
_INDENT = 4
_WITHOUT_BRACES = str.maketrans("", "", "{}")  # typer marks required arguments with them
_FRAME = 4  # columns of the border and its padding


def _groups(parameters: list[Any]) -> dict[str, list[Any]]:
    """Parameters that are shown, by heading; arguments first."""
    groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None)
            title = panel or ("Arguments" if argument else "Options")
            groups.setdefault(title, []).append(parameter)
    return {title: shown for title, shown in groups.items() if shown}


def _names(parameter: Any, ctx: Any) -> Text:
    if parameter.param_type_name == "argument":
        required = " (required)" if parameter.required else ""
        return Text.assemble((str(parameter.metavar), "bold cyan"), required)
    # long names first: click keeps the names of --help in a set
    names = ", ".join(sorted(parameter.opts, key=lambda name: not name.startswith("--")))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    required = " (required)" if parameter.required else ""
    value = _value(parameter, ctx)
    return Text.assemble((names, "bold cyan"), (f" {value}" if value else "", "yellow"), required)


def _value(parameter: Any, ctx: Any) -> str:
    """Placeholder of the value; empty for a flag."""
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return str(parameter.metavar)
    described = getattr(parameter, "display_type_rich", None)
    return str(described(ctx)) if described else f"<{parameter.type.name}>"


def _help(parameter: Any) -> Text:
    """Help with the default, unless it is unset or a flag that is off."""
    text = Text(" ".join((parameter.help or "").split()))
    default = parameter.default
    if not parameter.show_default or default in (None, False, "", [], ()) or callable(default):
        return text
    shown = parameter.opts[0] if default is True else default
    return text.append(f" [default: {shown}]", "dim")


def _side_by_side(rows: list[tuple[Text, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for names, text in rows:
        grid.add_row(names, text)
    return grid


def _lines(rows: list[tuple[Text, Text]], width: int) -> Iterator[RenderableType]:
    for names, text in rows:
        if names.cell_len > width:  # choices wrap between, not in, their names
            yield Text(names.plain.replace("|", " | "), "bold cyan", overflow="fold")
        else:
            yield names
        yield Padding(text, (0, 0, 0, _INDENT))


_NO_LORA = "Quire does not support LoRA adapters: merge the adapter into the weights first"
_ONE_DEVICE = "use --tensor-parallel-size for several devices, or start one server per device"
_OFFLOAD = "use --kv-offload-memory for KV or --weights-memory for weights"

_MODEL = "the model is the first argument, without a flag"

FLAGS = {
    # vLLM and SGLang
    "gpu-memory-utilization": "use --kv-memory with the bytes of the KV memory, such as 8GiB",
    "mamba-ssm-dtype": "use --kv-codec none+states=bfloat16",
    "mamba-ssm-cache-dtype": "use --kv-codec none+states=bfloat16",
    "mamba-track-interval": "use --state-checkpoint-interval",
    "max-mamba-cache-size": "use --state-checkpoint-memory with bytes, such as 1GiB",
    "mem-fraction-static": "use --kv-memory with the bytes of the KV memory, such as 8GiB",
    "kv-cache-memory-bytes": "use --kv-memory",
    "num-gpu-blocks-override": "use --kv-memory with the bytes of the KV memory",
    "cpu-offload-gb": "use --weights-memory with the bytes of weights that stay on the device",
    "kv-offloading-size": "use --kv-offload-memory with a size such as 4GiB",
    "quantization": "use --weight-codec for weights or --kv-codec for the KV cache; GPTQ, AWQ and "
    "GGUF files are recognized",
    "pipeline-parallel-size": _ONE_DEVICE,
    "data-parallel-size": "use --ray with --ray-replicas for several engines behind one address",
    "tp-size": "use --tensor-parallel-size",
    "enable-lora": _NO_LORA,
    "lora-modules": _NO_LORA,
    "speculative-config": "use --speculative with the same JSON; its method is ngram, suffix or "
    "draft_model",
    "speculative-model": "use --speculative draft:model=NAME",
    "enable-auto-tool-choice": "not needed: requests with `tools` use the parser of --tool-parser",
    "enable-chunked-prefill": "not needed: prompts are always prefilled in chunks of at most "
    "--max-num-batched-tokens",
    "scheduling-policy": "use the request field `priority`, or --urgent; see --batcher",
    "enforce-eager": "use --no-cuda-graphs",
    "guided-decoding-backend": "not needed: structured outputs use llguidance",
    "revision": "download the revision to a folder and pass the folder as MODEL",
    "tokenizer": "put the tokenizer's files into the model folder",
    "download-dir": "set the environment variable HF_HOME",
    "max-running-requests": "use --max-num-seqs",
    "context-length": "use --max-model-len",
    "model-path": _MODEL,
    "chunked-prefill-size": "use --max-num-batched-tokens",
    "page-size": "use --block-size",
    "disable-radix-cache": "use --no-enable-prefix-caching",
    # llama.cpp
    "ctx-size": "use --max-model-len for the longest sequence and --kv-memory for the memory",
    "chat-template-file": "use --chat-template, which takes a file or the template itself",
    "n-gpu-layers": "use --weights-memory with the bytes of weights that stay on the device",
    "cache-type-k": "use --kv-codec KEYS/VALUES, such as int8/int4",
    "cache-type-v": "use --kv-codec KEYS/VALUES, such as int8/int4",
    "parallel": "use --max-num-seqs",
    "n-predict": "use --max-tokens",
    "temp": "use --temperature",
    "no-mmap": "not needed: weights are read into memory; see --weights-memory",
    # Transformers
    "max-new-tokens": "use --max-tokens",
    "max-length": "use --max-tokens for the output and --max-model-len for prompt and output",
    "torch-dtype": "use --dtype",
    "num-beams": "use --use-beam-search with --beam-width",
    "do-sample": "use --temperature; 0 is greedy",
    "attn-implementation": "use --attention",
}
"""What to use instead of a flag, by its name without the leading dashes."""

SHORT_FLAGS = {
    "-m": _MODEL,
    "-c": FLAGS["ctx-size"],
    "-n": FLAGS["n-predict"],
    "-np": FLAGS["parallel"],
    "-ngl": FLAGS["n-gpu-layers"],
    "-ctk": FLAGS["cache-type-k"],
    "-ctv": FLAGS["cache-type-v"],
}
"""What to use instead of a short flag of llama.cpp."""


def short_flag(name: str, arguments: Sequence[str]) -> str:
    """The short flag of llama.cpp that was written, of which click reports one letter."""
    written = (text.partition("=")[0] for text in arguments)
    return next((text for text in written if text in SHORT_FLAGS and text[:2] == name), name)


def instead_of(flag: str) -> str | None:
    """Return what to use instead of another engine's flag; None if the flag is not known."""
    if flag in SHORT_FLAGS:
        return SHORT_FLAGS[flag]
    return FLAGS.get(flag.lstrip("-").replace("_", "-").lower())
