"""Every `quire` command in a document has a command line that `quire` accepts."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from quire.cli.command import UsageError
from quire.cli.main import app
from support.snippets import ROOT

# the results log has commands of the commit of each entry
DOCUMENTS = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.name != "log.md"]
SHELLS = {"", "text", "sh", "console", "bash"}
END_OF_COMMAND = {"|", ">", ">>", "&", "&&", ";"}


def shell_lines(text: str) -> Iterator[str]:
    """Lines of blocks that may contain commands; a line that ends with a backslash continues."""
    language = None
    for line in text.replace("\\\n", " ").splitlines():
        fence = re.match(r"\s*```(\w*)", line)
        if fence:
            language = fence[1] if language is None else None
        elif language in SHELLS:
            yield line.strip().removeprefix("$ ")


def commands(path: Path) -> Iterator[list[str]]:
    for line in shell_lines(path.read_text(encoding="utf-8")):
        if line.startswith("quire "):
            words = shlex.split(line, comments=True)
            ends = [number for number, word in enumerate(words) if word in END_OF_COMMAND]
            yield words[1 : min(ends, default=len(words))]


def parse(words: list[str]) -> None:
    """Parse a command line without running the command."""
    command, context = typer.main.get_command(app), None
    while hasattr(command, "resolve_command"):
        context = command.make_context("quire", words, parent=context)
        name, command, words = command.resolve_command(context, words)
    assert command is not None
    assert context is not None
    command.make_context(name, words, parent=context)


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_commands_in_documents_are_accepted(path: Path) -> None:
    for words in commands(path):
        try:
            parse(words)
        except typer.Exit:  # --help and --version
            continue
        except UsageError as error:
            pytest.fail(f"quire {' '.join(words)}: {error.format_message()}")


def test_commands_are_found_and_unknown_options_refused() -> None:
    assert len([words for path in DOCUMENTS for words in commands(path)]) > 15

    with pytest.raises(UsageError):
        parse(["plan", "quire-tiny", "--no-such-option", "1"])
