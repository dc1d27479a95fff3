"""`quire chat`: a conversation in the terminal.

Input of `quire chat`: an editor with history on a terminal, else lines of standard input.

A message ends at Enter. Alt+Enter, or a backslash at the end of a line, continues it on a new line.
"""

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unicodedata import east_asian_width

import typer

from quire.cli.generate import end_note, usage_line
from quire.cli.options import KV, MODEL, SAMPLING, SCHEDULE, options_of
from quire.cli.settings import Settings, with_settings
from quire.cli.startup import is_terminal
from quire.config.chat_messages import Message, read_messages
from quire.config.sampling_params import RESPONSE_TEMPERATURE, RESPONSE_TOP_P
from quire.errors import ConfigError, ModelError, RequestError, UnknownName
from quire.layout.config import read_json_object
from quire.layout.options import option
from quire.layout.packaged import PACKAGED_MODEL, SMOLLM2
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings

    from quire.api.llm import LLM
    from quire.models.chat_template import ChatTemplate
    from quire.sampling.outputs import OutputDelta, Usage

_GREETING = "/help shows the commands, /exit or Ctrl-D exits, Ctrl-C stops a response"
_EXITS = ("/exit", "/quit")
_KEYS = {
    "Ctrl-C": "stop a response; at the prompt: discard the line",
    "Ctrl-D": "exit, also during a response",
    "Alt+Enter": "start a new line; so does Enter after a backslash",
    "//TEXT": "send a message that starts with a slash",
}
CHAT_SAMPLING = replace(
    SAMPLING.without("n", "best-of", "use-beam-search", "beam-width", "length-penalty"),
    help={
        "temperature": "divides the logits; 0 (or below 1e-5) is greedy. None: the model's, else "
        f"{RESPONSE_TEMPERATURE}, with top-p {RESPONSE_TOP_P}",
        "top_p": "sample from the smallest set with this probability, in (0, 1]. None: the "
        f"model's, else {RESPONSE_TOP_P}, or 1 if a temperature is set",
    },
)
_DEFAULTS = {"max-tokens": 512}
_OPTIONS = {found.name: found for found in options_of((CHAT_SAMPLING,), _DEFAULTS)}
_ONE_CONVERSATION = SCHEDULE.without(
    *("max-num-seqs", "admission", "low-watermark", "high-watermark", "scale-down-at"),
    *("preempt", "batcher", "urgent", "tenants"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """Options of `quire chat`."""

    system: str | None = option(None, help="System message of the conversation.", common=True)
    chat_template: str | None = option(
        None,
        help="File with a Jinja chat template, or the template itself, instead of the model's.",
        common=True,
    )


@with_settings(
    MODEL,
    KV.without("swap-space", "evict-allow", "record-evictions"),
    _ONE_CONVERSATION,
    CHAT_SAMPLING,
    defaults=_DEFAULTS,
)
def chat(settings: Settings, *, flags: ChatFlags) -> None:
    """Chat with a model; the model needs a chat template.

    If neither the model nor an option sets a temperature, it is 0.2, with top-p 0.9.

    A response of more than 512 tokens is cut, and marked as such; `/set max_tokens N` in the chat
    raises the limit. The rest of the context and of the KV memory can lower it.
    """
    if not settings.sampling.max_tokens:
        raise RequestError("expected --max-tokens of 1 or more, got 0: a chat needs responses")
    conversation = Conversation(settings, flags.system, flags.chat_template)
    notes = WordWrap(sys.stderr)
    notes.line(f"{conversation.llm.model.name}: {conversation.sampling_line()}")
    if conversation.llm.model.name == PACKAGED_MODEL:
        notes.line(f"{PACKAGED_MODEL} is not a chat model: use quire chat {SMOLLM2}")
    notes.line(_GREETING)
    read = _editor(list(_COMMANDS)) if is_terminal(sys.stdin) else read_lines
    while not conversation.keyboard.ended:
        message = read()
        if message is None or message in _EXITS:
            return
        try:
            if message.startswith("/") and not message.startswith("//"):
                note = _run_command(message, conversation)
                if note:
                    notes.line(note)
            elif message:
                conversation.respond(message.removeprefix("/"))
        except (ConfigError, ModelError, RequestError) as error:
            notes.line(f"error: {error}")


def _run_command(line: str, conversation: "Conversation") -> str:
    name, _, argument = line.partition(" ")
    if name not in _COMMANDS:
        raise RequestError(f"unknown command {name!r}: expected {', '.join(_COMMANDS)}")
    command = _COMMANDS[name]
    if command.argument == "FILE" and not argument.strip():
        raise RequestError(f"expected {name} {command.argument}, got {name}")
    return command.run(conversation, argument.strip())


class Conversation:
    """Messages of a chat, and the model that generates responses."""

    def __init__(
        self, settings: Settings, system: str | None, chat_template: str | None = None
    ) -> None:
        self._messages: list[Message] = []
        self._refused: Message | None = None  # the last message, if it got no response
        self.set_system(system or "")
        self._evict = settings.kv.evict
        self._usage: Usage | None = None
        self._prompt_tokens = self._responses = 0
        self.keyboard = Keyboard()
        self.llm: LLM = settings.for_one_request().open_llm()
        self._template = _template_of(self.llm, chat_template, settings.model)
        self._sampling = settings.sampling

    def sampling_line(self) -> str:
        """The options that responses are sampled with, except neutral ones."""
        text = self._sampling.response_text(self.llm.model.generation, _OPTIONS)
        return f"{text}; /set changes them"

    def set_option(self, argument: str) -> str:
        """Set a sampling option to a JSON value, or to its default."""
        name, _, text = argument.partition(" ")
        if argument:
            found = _OPTIONS.get(name.replace("-", "_"))
            if found is None:
                raise UnknownName("sampling option", name, _OPTIONS)
            value: Any = text
            if not text:
                shown = self._sampling.response_value(self.llm.model.generation, found.name)
                return (
                    f"{shown}: {found.help.rstrip('.')}; /set {found.name} VALUE changes it, "
                    f"/set {found.name} default restores the default"
                )
            with suppress(ValueError):  # a text is a stop string, or refused
                value = found.default if text == "default" else json.loads(text)
            self._sampling = replace(self._sampling, **{found.name: value})
        return self.sampling_line()

    def set_system(self, text: str) -> str:
        others = [message for message in self._messages if message["role"] != "system"]
        self._messages = [{"role": "system", "content": text}] * bool(text) + others
        return f"(system message {'set' if text else 'deleted'})"

    def clear(self, _: str) -> str:
        self._messages = [message for message in self._messages if message["role"] == "system"]
        self._prompt_tokens = 0
        return "(conversation cleared)"

    def save(self, file: str) -> str:
        body = {"model": self.llm.model.name, "messages": self._messages}
        try:
            text = json.dumps(body, ensure_ascii=False, indent=2)
            Path(file).expanduser().write_text(f"{text}\n", "utf-8")
        except OSError as error:
            raise RequestError(f"{file} cannot be written: {error.strerror}") from error
        return f"({len(self._messages)} messages saved to {file})"

    def load(self, file: str) -> str:
        content = read_json_object(Path(file).expanduser())
        self._messages, self._refused = read_messages(content.get("messages")), None
        self._prompt_tokens = 0
        return f"({len(self._messages)} messages loaded from {file})"

    def help(self, _: str) -> str:
        commands = {f"{name} {of.argument}": of.meaning for name, of in _COMMANDS.items()}
        lines = [f"{name:18} {meaning}" for name, meaning in (commands | _KEYS).items()]
        return "\n".join([*lines, f"Options of /set: {', '.join(_OPTIONS)}"])

    def stats(self, _: str) -> str:
        stats = self.llm.stats()
        fitting, limit = self._fitting(self._prompt_tokens)
        last = "none yet" if self._usage is None else usage_line(self._usage, self._evict)
        return (
            f"conversation: {len(self._messages)} messages, {self._prompt_tokens:,} of {fitting:,} "
            f"tokens {limit}\nlast response: {last}\n"
            f"KV memory: {format_size(stats.kv_used_bytes)} in use "
            f"({format_size(stats.cached_bytes)} of cached prefixes) of "
            f"{format_size(stats.kv_total_bytes)}"
        )

    def _fitting(self, tokens: int) -> tuple[int, str]:
        """Tokens of the longest conversation, and what limits it."""
        context, engine = self.llm.context_tokens(max(1, tokens)), self.llm.engine
        spec = engine.pool.eviction.spec
        fitting = engine.scheduler.peaks.longest_request(context, spec)
        return fitting, "that fit into the KV memory" if fitting < context else "of context"

    def _too_long(self, num_tokens: int, *, can_clear: bool) -> str:
        from quire.scheduler.peaks import Need  # imports numpy

        fitting, limit = self._fitting(num_tokens)
        what, changes = "message", ["send a shorter one"]
        if can_clear:
            what, changes = "conversation", ["/clear starts over (/save FILE first keeps it)"]
        if limit != "of context":
            engine, context = self.llm.engine, self.llm.context_tokens(num_tokens)
            tokens = min(context, num_tokens + (self._sampling.max_tokens or context))
            need = Need(tokens, eviction=engine.pool.eviction.spec)
            size = engine.scheduler.peaks.fitting_option(need)
            changes.append(f"--kv-memory {size} leaves room")
            if need.eviction.cap is None:
                changes.append("--evict RULE:cap=TOKENS evicts old tokens")
        return (
            f"the {what} of {num_tokens:,} tokens leaves no room for a response in the "
            f"{fitting:,} tokens {limit}: {', or '.join(changes)}"
        )

    def respond(self, message: str) -> None:
        """Generate and stream the response to a message; a refused message is deleted."""
        self._refused = {"role": "user", "content": message}
        self._respond_to([*self._messages, self._refused])

    def retry(self, _: str) -> str:
        if self._refused is not None:
            self._respond_to([*self._messages, self._refused])
            return ""
        asked = [i for i, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            raise RequestError("expected a message before /retry, got none: send one first")
        self._respond_to(self._messages[: asked[-1] + 1])
        return ""

    def _respond_to(self, messages: list[Message]) -> None:
        earlier = any(message["role"] == "assistant" for message in messages)
        text = self._stream(self._template.encode(messages), can_clear=earlier)
        self._messages = [*messages, {"role": "assistant", "content": text}]
        self._refused = None

    def _stream(self, token_ids: list[int], *, can_clear: bool) -> str:
        from quire.sampling.outputs import OutputBuilder  # imports torch
        from quire.scheduler.request import KV_MEMORY

        text, output = "", None
        self._responses += 1
        num_tokens = len(token_ids)
        builder = OutputBuilder(f"chat-{self._responses}", tuple(token_ids))
        shown = WordWrap(sys.stdout)
        params = self._sampling.with_response_defaults(self.llm.model.generation)
        stream = self.llm.stream(token_ids, params, limit_max_tokens=True)
        deltas = cast("Generator[OutputDelta]", stream)
        with closing(deltas), self.keyboard.watched() as stopped:  # closing cancels
            try:
                for delta in deltas:
                    shown.write(delta.text)
                    text += delta.text
                    num_tokens += len(delta.token_ids)
                    output = builder.add(delta)
                    if stopped():
                        break
            except RequestError as error:
                if error.param != "prompt":
                    raise
                raise RequestError(self._too_long(num_tokens, can_clear=can_clear)) from error
        shown.end()
        if output is not None and output.error is not None:
            raise RequestError(output.error)
        self._prompt_tokens = num_tokens
        if output is not None:
            self._usage = output.usage
            freeing = "/clear starts over"
            if not can_clear:
                freeing = "a shorter message leaves more"
                if output.usage.max_tokens_limit == KV_MEMORY:
                    freeing = "a larger --kv-memory leaves more"
            going_on = "/set min_tokens N makes it go on"
            note = end_note(output, "/set max_tokens N raises it", freeing, going_on)
            if note:
                WordWrap(sys.stderr).line(note)
        return text


@dataclass(frozen=True, slots=True)
class _ChatCommand:
    argument: str
    meaning: str
    run: Callable[[Conversation, str], str]  # returns what is printed


_COMMANDS = {
    "/help": _ChatCommand("", "show this list", Conversation.help),
    "/retry": _ChatCommand(
        "", "generate the last response again, or respond to a refused message", Conversation.retry
    ),
    "/clear": _ChatCommand("", "delete all messages except the system message", Conversation.clear),
    "/system": _ChatCommand(
        "[TEXT]", "set the system message; without TEXT: delete it", Conversation.set_system
    ),
    "/set": _ChatCommand(
        "[NAME VALUE]",
        "set a sampling option; VALUE default: its default; without VALUE: show it",
        Conversation.set_option,
    ),
    "/save": _ChatCommand("FILE", "write the messages to a JSON file", Conversation.save),
    "/load": _ChatCommand("FILE", "continue the messages of such a file", Conversation.load),
    "/stats": _ChatCommand("", "show tokens, times and KV memory", Conversation.stats),
    "/exit": _ChatCommand("", "exit; so do /quit and Ctrl-D", Conversation.help),
}


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


class Keyboard:
    """Keys that are pressed during a response, which are not echoed into it.

    Ctrl-C ends the response and Ctrl-D the chat, between two steps: the engine is used again. The
    next prompt gets all other keys.
    """

    def __init__(self) -> None:
        self.ended = self._interrupted = False

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Yield a function that returns whether to end the response."""
        self._interrupted = False
        with ExitStack() as stack:
            before = signal.signal(signal.SIGINT, lambda number, frame: self._interrupt())
            stack.callback(signal.signal, signal.SIGINT, before)
            if not is_terminal(sys.stdin):
                yield lambda: self._interrupted
                return
            from prompt_toolkit.application import get_app_session

            terminal = get_app_session().input
            stack.enter_context(terminal.raw_mode())
            stack.callback(self._read, terminal)
            yield lambda: self._read(terminal)

    def _interrupt(self) -> None:
        self._interrupted = True

    def _read(self, terminal: "Input") -> bool:
        from prompt_toolkit.input.typeahead import store_typeahead
        from prompt_toolkit.keys import Keys

        pressed = terminal.read_keys()
        self.ended |= any(press.key == Keys.ControlD for press in pressed)
        self._interrupted |= any(press.key == Keys.ControlC for press in pressed)
        others = [press for press in pressed if press.key not in (Keys.ControlC, Keys.ControlD)]
        store_typeahead(terminal, others)
        return self._interrupted or self.ended


class WordWrap:
    """Text that arrives in parts; on a terminal, lines break between words.

    A word is written when it is complete.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._column = stream, 0
        self._space = self._word = ""

    def line(self, text: str) -> None:
        self.write(text)
        self.end()

    def write(self, text: str) -> None:
        if not is_terminal(self._stream):
            self._echo(text)
            return
        for char in text:
            if char == "\n":
                self.end()
            elif char.isspace():
                self._put_word()
                self._space += char.expandtabs(4)
            else:
                self._word += char
                if east_asian_width(char) in "WF":  # Chinese and Japanese have no spaces
                    self._put_word()

    def end(self) -> None:
        """Write the last word and end the line."""
        self._put_word()
        self._echo("\n")
        self._column, self._space = 0, ""

    def _put_word(self) -> None:
        if not self._word:
            return
        from prompt_toolkit.utils import get_cwidth

        width = shutil.get_terminal_size().columns
        if self._column and self._column + get_cwidth(self._space + self._word) > width:
            self._echo("\n")
            self._column, self._space = 0, ""
        self._echo(self._space + self._word)
        self._column += get_cwidth(self._space + self._word)
        self._column = (self._column - 1) % width + 1  # a long word takes several lines
        self._space = self._word = ""

    def _echo(self, text: str) -> None:
        typer.echo(text, file=self._stream, nl=False)
        self._stream.flush()


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

    @keys.add("c-d")  # with a draft, too
    def _(event: Any) -> None:
        event.app.exit(exception=EOFError)

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUED):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return keys
