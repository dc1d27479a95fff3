"""Input of `quire chat`: an editor with history on a terminal, else lines of standard input.

A message ends at Enter. Alt+Enter, or a backslash at the end of a line, continues it on a new line.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.startup import is_terminal
from quire.errors import RequestError

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

CONTINUED = "\\"
PROMPT = "> "
_NO_EXIT = "(Ctrl-D or /exit exits)"

ReadMessage = Callable[[], str | None]
"""Return the next message without surrounding blanks; None at the end of the input."""


def message_reader(commands: Sequence[str]) -> ReadMessage:
    """Return the editor on a terminal, else a reader of standard input.

    Args:
        commands: commands that the editor completes, such as /help.
    """
    return _editor(commands) if is_terminal(sys.stdin) else read_lines


def read_lines() -> str | None:
    """Read a message from standard input.

    Raises:
        RequestError: standard input is not UTF-8 text.
    """
    lines: list[str] = []
    try:
        while line := sys.stdin.readline():
            lines.append(line.rstrip("\r\n"))
            if not lines[-1].endswith(CONTINUED):
                break
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text: {error}") from error
    return joined(lines).strip() if lines else None


def joined(lines: Sequence[str]) -> str:
    """Join the lines of a message; a backslash at the end of a line is left out."""
    return "\n".join(line.removesuffix(CONTINUED) for line in lines)


def history_file(environment: Mapping[str, str], home: Path) -> Path:
    """File of earlier messages, in the folder for state of the XDG specification."""
    state = environment.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else home / ".local" / "state"
    return folder / "quire" / "chat_history"


def _editor(commands: Sequence[str]) -> ReadMessage:
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
                typer.echo(_NO_EXIT, err=True)
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
