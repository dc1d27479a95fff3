"""`quire chat`: a conversation in the terminal."""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import typer

from quire.cli.settings import Settings, with_settings
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.sampling.outputs import OutputDelta

_GREETING = "/reset clears the conversation, /exit or Ctrl-D exits, Ctrl-C stops a response"


@with_settings(defaults={"max-tokens": 512})
def chat(
    settings: Settings,
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the conversation.")
    ] = None,
) -> None:
    """Chat with a model; the model needs a chat template."""
    if settings.sampling.n > 1:
        raise RequestError(f"a chat needs one response per message, got n={settings.sampling.n}")
    conversation = Conversation(settings, system)
    typer.echo(f"{conversation.llm.model.name}: {_GREETING}", err=True)
    while True:
        message = _read_message()
        if message is None or message == "/exit":
            return
        if message == "/reset":
            conversation.reset()
            typer.echo("(conversation cleared)", err=True)
        elif message:
            conversation.respond(message)


class Conversation:
    """Messages of a chat, and the model that generates responses.

    Args:
        settings: options of the model and of sampling.
        system: system message; None for none.
    """

    def __init__(self, settings: Settings, system: str | None) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._sampling = settings.sampling
        settings.refuse_other_tenants()
        self.llm: LLM = settings.open_llm()

    def reset(self) -> None:
        """Delete all messages except the system message."""
        self._messages = list(self._opening)

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
        token_ids = self.llm.encode_chat(self._messages)
        context = self.llm.context_tokens(len(token_ids))
        if len(token_ids) >= context:
            raise RequestError(
                f"with this message the conversation has {len(token_ids)} tokens, the model's "
                f"context {context}: use /reset to start over, or send a shorter message"
            )
        text = ""
        deltas = cast("Generator[OutputDelta]", self.llm.stream(token_ids, self._sampling))
        with closing(deltas), _interrupt_noted() as interrupted:  # closing cancels
            for delta in deltas:
                _show(delta)
                text += delta.text
                if interrupted():
                    break
        typer.echo()
        if len(token_ids) + self._sampling.max_tokens > context:
            typer.echo(
                f"(the context of {context} tokens is nearly full: use /reset to start over)",
                err=True,
            )
        return text


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    # Ctrl-C ends a response between two steps, not within a step: the engine is used again
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: presses.append(number))
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)


def _show(delta: "OutputDelta") -> None:
    typer.echo(delta.text, nl=False)
    sys.stdout.flush()
    if delta.error is not None:
        raise RequestError(delta.error)


def _read_message() -> str | None:
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from error
    return line.strip() if line else None
