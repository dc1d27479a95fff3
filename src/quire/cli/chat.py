"""`quire chat`: a conversation in the terminal.

Input of `quire chat`: an editor with history on a terminal, else lines of standard input.

A message ends at Enter. Alt+Enter, or a backslash at the end of a line, continues it on a new line.
"""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from quire.cli.generate import usage_line
from quire.cli.settings import Settings, with_settings
from quire.cli.startup import is_terminal
from quire.errors import ConfigError, RequestError
from quire.layout.options import option
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

    from quire.api.llm import LLM
    from quire.models.chat_template import ChatTemplate
    from quire.sampling.outputs import OutputBuilder, OutputDelta, Usage

_GREETING = "/help shows the commands, /exit or Ctrl-D exits, Ctrl-C stops a response"
_COMMANDS = {
    "/help": "show this list",
    "/clear": "delete all messages except the system message",
    "/stats": "show tokens, times and KV memory",
    "/exit": "exit; so does Ctrl-D",
}
_KEYS = {
    "Ctrl-C": "stop a response; at the prompt: discard the line",
    "Alt+Enter": "start a new line; so does Enter after a backslash",
    "//TEXT": "send a message that starts with a slash",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """Options of `quire chat`."""

    system: str | None = option(None, help="System message of the conversation.", common=True)
    chat_template: str | None = option(
        None,
        help="File with a Jinja chat template, or the template itself, instead of the model's.",
        common=True,
    )


@with_settings(defaults={"max-tokens": 512})
def chat(settings: Settings, *, flags: ChatFlags) -> None:
    """Chat with a model; the model needs a chat template."""
    if settings.sampling.n > 1:
        raise RequestError(f"a chat needs one response per message, got n={settings.sampling.n}")
    if not settings.sampling.max_tokens:
        raise RequestError("expected --max-tokens of 1 or more, got 0: a chat needs responses")
    conversation = Conversation(settings, flags.system, flags.chat_template)
    typer.echo(f"{conversation.llm.model.name}: {_GREETING}", err=True)
    read = _editor([*_COMMANDS]) if is_terminal(sys.stdin) else read_lines
    while True:
        message = read()
        if message is None or message == "/exit":
            return
        if message.startswith("/") and not message.startswith("//"):
            _run_command(message, conversation)
        elif message:
            conversation.respond(message.removeprefix("/"))


def _run_command(command: str, conversation: "Conversation") -> None:
    if command == "/clear":
        conversation.clear()
        typer.echo("(conversation cleared)", err=True)
    elif command == "/stats":
        typer.echo(conversation.stats(), err=True)
    elif command == "/help":
        for name, meaning in (_COMMANDS | _KEYS).items():
            typer.echo(f"{name:10} {meaning}", err=True)
    else:
        known = ", ".join(_COMMANDS)
        typer.echo(f"error: unknown command {command.split()[0]!r}: expected {known}", err=True)


class Conversation:
    """Messages of a chat, and the model that generates responses."""

    def __init__(
        self, settings: Settings, system: str | None, chat_template: str | None = None
    ) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._sampling = settings.sampling
        self._evict = settings.kv.evict
        self._usage: Usage | None = None
        self._prompt_tokens = self._responses = 0
        settings.refuse_other_tenants()
        self.llm: LLM = settings.open_llm()
        self._template = _template_of(self.llm, chat_template, settings.model)

    def clear(self) -> None:
        self._messages = list(self._opening)
        self._prompt_tokens = 0

    def stats(self) -> str:
        stats = self.llm.stats()
        context = self.llm.context_tokens(max(1, self._prompt_tokens))
        last = "none yet" if self._usage is None else usage_line(self._usage, self._evict)
        return (
            f"conversation: {len(self._messages)} messages, {self._prompt_tokens:,} of {context:,} "
            f"tokens of context\nlast response: {last}\n"
            f"KV memory: {format_size(stats.kv_used_bytes)} in use "
            f"({format_size(stats.cached_bytes)} of cached prefixes) of "
            f"{format_size(stats.kv_total_bytes)}"
        )

    def respond(self, message: str) -> None:
        """Generate and stream the response to a message; a refused message is deleted."""
        self._messages.append({"role": "user", "content": message})
        try:
            text = self._stream()
        except RequestError as error:
            self._messages.pop()
            typer.echo(f"error: {error}", err=True)
            return
        self._messages.append({"role": "assistant", "content": text})

    def _stream(self) -> str:
        token_ids = self._template.encode(self._messages)
        context = self.llm.context_tokens(len(token_ids))
        if len(token_ids) >= context:
            raise RequestError(
                f"with this message the conversation has {len(token_ids)} tokens, the model's "
                f"context {context}: use /clear to start over, or send a shorter message"
            )
        from quire.sampling.outputs import OutputBuilder  # imports torch

        text = ""
        self._responses += 1
        self._prompt_tokens = len(token_ids)
        builder = OutputBuilder(f"chat-{self._responses}", tuple(token_ids))
        deltas = cast("Generator[OutputDelta]", self.llm.stream(token_ids, self._sampling))
        with closing(deltas), _interrupt_noted() as interrupted:  # closing cancels
            for delta in deltas:
                typer.echo(delta.text, nl=False)
                sys.stdout.flush()
                if delta.error is not None:
                    raise RequestError(delta.error)
                text += delta.text
                self._note(builder, delta)
                if interrupted():
                    break
        typer.echo()
        if len(token_ids) + self._sampling.max_tokens > context:
            typer.echo(
                f"(the context of {context} tokens is nearly full: use /clear to start over)",
                err=True,
            )
        return text

    def _note(self, builder: "OutputBuilder", delta: "OutputDelta") -> None:
        """Store the usage of a response that is complete."""
        output = builder.add(delta)
        if output is not None:
            self._usage = output.usage
            self._prompt_tokens += output.usage.completion_tokens


def _template_of(llm: "LLM", chat_template: str | None, model: str) -> "ChatTemplate":
    """The chat template of a file or text, else of the model."""
    from quire.models.chat_template import ChatTemplate, with_chat_template  # imports torch

    tokenizer = with_chat_template(llm.model, chat_template).tokenizer
    if tokenizer is not None and tokenizer.chat_template:
        return ChatTemplate(tokenizer, llm.content_format)
    missing = "tokenizer" if tokenizer is None else "chat template"
    raise ConfigError(
        f"{llm.model.name} has no {missing}, which quire chat needs to convert messages to a "
        f"prompt: pass --chat-template FILE, use quire generate {shlex.quote(model)} PROMPT, or "
        "a chat (instruct) version of the model"
    )


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    # Ctrl-C ends a response between two steps, not within a step: the engine is used again
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: presses.append(number))
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


CONTINUED = "\\"
PROMPT = "> "


def read_lines() -> str | None:
    """Read a message from standard input."""
    lines: list[str] = []
    try:
        while line := sys.stdin.readline():
            lines.append(line.rstrip("\r\n"))
            if not lines[-1].endswith(CONTINUED):
                break
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from error
    return "\n".join(line.removesuffix(CONTINUED) for line in lines).strip() if lines else None


def history_file(environment: Mapping[str, str], home: Path) -> Path:
    """File of earlier messages, in the folder for state of the XDG specification."""
    state = environment.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else home / ".local" / "state"
    return folder / "quire" / "chat_history"


def _editor(commands: Sequence[str]) -> Callable[[], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    session: PromptSession[str] = PromptSession(
        history=_history(),
        key_bindings=_keys(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
    )

    def read() -> str | None:
        while True:
            try:
                return session.prompt(PROMPT).strip()
            except KeyboardInterrupt:  # the line is discarded, as in other interactive programs
                typer.echo("(Ctrl-D or /exit exits)", err=True)
            except EOFError:
                return None

    return read


def _history() -> "History":
    """Earlier messages; in memory only if their file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_file(os.environ, Path.home())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # messages can be private
        with path.open("a"):
            pass
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUED):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return keys
