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

_GREETING = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@with_settings(defaults={"max-tokens": 512})
def chat(
    settings: Settings,
    *,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message that opens the conversation.")
    ] = None,
) -> None:
    """Talk to a model; it needs a chat template."""
    if settings.sampling.n > 1:
        raise RequestError(f"a conversation goes on from one answer, got n={settings.sampling.n}")
    conversation = Conversation(settings, system)
    typer.echo(f"{conversation.llm.model.name}: {_GREETING}", err=True)
    while True:
        said = _ask()
        if said is None or said == "/exit":
            return
        if said == "/reset":
            conversation.reset()
            typer.echo("(forgotten)", err=True)
        elif said:
            conversation.answer(said)


class Conversation:
    """Messages so far, and the model that continues them.

    Args:
        settings: of the model and of every answer.
        system: content of the first message; None for none.
    """

    def __init__(self, settings: Settings, system: str | None) -> None:
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._sampling = settings.sampling
        settings.refuse_other_tenants()
        self.llm: LLM = settings.open_llm()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = list(self._opening)

    def answer(self, said: str) -> None:
        """Print the answer to a message while it is made; a refused message is forgotten."""
        self._messages.append({"role": "user", "content": said})
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
                f"context {context}: /reset to start over, or say it shorter"
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
            typer.echo(f"(the context of {context} tokens is nearly full: /reset)", err=True)
        return text


@contextmanager
def _interrupt_noted() -> Iterator[Callable[[], bool]]:
    # Ctrl-C ends an answer between two steps, never inside one: the engine goes on being used
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


def _ask() -> str | None:
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from error
    return line.strip() if line else None
