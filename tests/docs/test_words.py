"""The words of docs/words.toml: retired flags, symbols and phrases occur nowhere else."""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = tomllib.loads((ROOT / "docs/words.toml").read_text())
KINDS = {".py", ".md", ".c", ".h", ".sh", ".html", ".toml"}
SEARCHED = (
    *("src", "docs", "README.md", "CONTRIBUTING.md"),
    *("benchmarks", "runs", "training", "tests/unit/benchmarks", "tests/unit/training"),
)
EXEMPT = {"docs/words.toml", "docs/log.md"}  # the list itself, and the record of what was measured


@cache
def texts() -> dict[str, str]:
    """Every file that is searched, by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SEARCHED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    paths = [path for path in listed if Path(path).suffix in KINDS and path not in EXEMPT]
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}


@cache
def uses(pattern: str) -> dict[str, list[str]]:
    """The lines where the pattern begins, by file; a space in it may be a line break or a `#`."""
    words = re.compile(pattern.replace(" ", r"(?:\s|#)+"), re.IGNORECASE)
    found = {
        path: [_line(path, match.start()) for match in words.finditer(text)]
        for path, text in texts().items()
    }
    return {path: lines for path, lines in found.items() if lines}


def _line(path: str, start: int) -> str:
    text = texts()[path]
    number = text.count("\n", 0, start) + 1
    return f"{path}:{number}: {text.splitlines()[number - 1].strip()}"


@pytest.mark.parametrize("kind", ["flags", "symbols"])
def test_no_retired_name_occurs(kind: str) -> None:
    names = sorted(WORDS[kind], key=len, reverse=True)
    assert not uses(rf"(?-i:(?<![A-Za-z0-9-])_?({'|'.join(names)})(?![A-Za-z0-9_-]))")


@pytest.mark.parametrize("phrase", WORDS["phrases"], ids=lambda phrase: phrase["pattern"])
def test_a_retired_phrase_occurs_only_where_it_is_allowed(phrase: dict) -> None:
    found = uses(phrase["pattern"])
    lines = [line for path in found.keys() - phrase["allowed"].keys() for line in found[path]]
    assert not lines, f"use instead: {phrase['use']}\n" + "\n".join(sorted(lines))


@pytest.mark.parametrize("phrase", WORDS["phrases"], ids=lambda phrase: phrase["pattern"])
def test_every_exception_is_used_and_has_a_reason(phrase: dict) -> None:
    found = uses(phrase["pattern"])
    assert phrase["allowed"].keys() <= found.keys()
    assert all(phrase["allowed"].values())
