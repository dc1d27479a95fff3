"""Code blocks of documents run or have a reason why not, and their commands are accepted."""

import doctest
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml

from quire.cli.command import UsageError
from quire.cli.main import app
from quire.errors import ModelError
from quire.layout.packaged import SMOLLM2
from quire.models.source import find_model
from support.snippets import ROOT, snippets

DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.name != "log.md"]

NOT_RUN = {
    "add-a-policy.md": (
        ("generated: recent", "a copy of src/quire/policies/recent.py, which has its own tests"),
        ('@register("seldom")', "the main lines of a rule; its imports are left out"),
    ),
    "quantization.md": (('@register("int8")', "the main lines of a codec of the package"),),
    "examples.md": (('--8<-- "examples/', "files that tests/docs/test_examples.py runs"),),
    "guides/clients.md": (
        ("not tested: langchain-openai", "a client that is not a dependency"),
        ("not tested: litellm", "a client that is not a dependency"),
    ),
    "serving.md": (("anthropic.Anthropic", "tests/serve/test_clients.py runs this client"),),
    "scale.md": (("BatchActor", "tests/scale/test_ray_batch.py runs this program"),),
}
"""Blocks without a test: a text of the block or of the line above it, and the reason."""

_BLOCK = re.compile(
    r"(?P<above>[^\n]*\n)(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


def name(path: Path) -> str:
    return path.relative_to(DOCS).as_posix()


def blocks(path: Path, language: str) -> Iterator[tuple[str, str]]:
    """The line above each block of a language, and the block's code."""
    for match in _BLOCK.finditer(path.read_text(encoding="utf-8")):
        if match["language"] == language:
            yield match["above"], match["code"]


def pages_with(language: str) -> list[Path]:
    return [path for path in PAGES if next(blocks(path, language), None) is not None]


@pytest.mark.parametrize("path", pages_with("python"), ids=name)
def test_every_python_block_is_tested_or_an_exception(path: Path) -> None:
    exceptions = [text for text, _ in NOT_RUN.get(name(path), ())]
    untested = [found for found in blocks(path, "python") if "<!-- tested: " not in found[0]]
    for above, code in untested:
        assert any(text in above + code for text in exceptions), f"not tested:\n{code}"
    for text in exceptions:
        assert any(text in above + code for above, code in untested), f"no such block: {text}"


def test_blocks_are_found_and_exceptions_name_pages() -> None:
    least = {"python": 18, "pycon": 26, "json": 5, "toml": 3, "yaml": 3}
    for language, count in least.items():
        assert sum(len(list(blocks(path, language))) for path in PAGES) >= count
    assert NOT_RUN.keys() <= {name(path) for path in PAGES}


def needs_smollm2(path: Path) -> bool:
    return any(f'"{SMOLLM2}"' in snippet.code for snippet in snippets(path))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if needs_smollm2(path) else [])
        for path in PAGES
        if snippets(path)
    ],
    ids=name,
)
def test_blocks_of_a_page_print_the_shown_output(path: Path, tmp_path: Path, capsys, monkeypatch):
    """Blocks of a page run in one namespace, in their order and in an empty folder."""
    from quire.policies import registry

    if needs_smollm2(path):
        try:
            find_model(SMOLLM2)
        except ModelError as error:
            pytest.skip(str(error))
    page = ModuleType("page")  # a dataclass looks up its module
    monkeypatch.setitem(sys.modules, "page", page)
    monkeypatch.chdir(tmp_path)

    with registry.temporary_registrations():
        for snippet in snippets(path):
            exec(snippet.code, page.__dict__)
            assert capsys.readouterr().out == snippet.output


@pytest.mark.parametrize("path", pages_with("pycon"), ids=name)
def test_sessions_of_a_page_print_the_shown_output(path: Path) -> None:
    sessions = "\n".join(code for _, code in blocks(path, "pycon"))
    test = doctest.DocTestParser().get_doctest(sessions, {}, name(path), str(path), 0)

    results = doctest.DocTestRunner().run(test)

    assert results.attempted > 0
    assert results.failed == 0


def read_json(code: str) -> None:
    """A block is one value, or with the title of a .jsonl file one value per line."""
    try:
        json.loads(code)
    except json.JSONDecodeError:
        for line in code.splitlines():
            json.loads(line)


READERS = {"json": read_json, "toml": tomllib.loads, "yaml": yaml.safe_load}


@pytest.mark.parametrize(
    ("language", "path"), [(form, path) for form in READERS for path in pages_with(form)]
)
def test_blocks_of_data_can_be_read(language: str, path: Path) -> None:
    for _, code in blocks(path, language):
        READERS[language](code)


# the results log has commands of the commit of each entry
TEXTS = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.name != "log.md"]
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
    "path", [*TEXTS, ROOT / "README.md"], ids=lambda path: str(path.relative_to(ROOT))
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
    assert len([words for path in TEXTS for words in commands(path)]) > 15

    with pytest.raises(UsageError):
        parse(["plan", "quire-tiny", "--no-such-option", "1"])
