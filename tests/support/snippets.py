"""Examples in documents: a `python` block under a mark, and the `text` block with its output."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SNIPPET = re.compile(
    r"<!-- tested: [^>]*-->\n```python[^\n]*\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```",
    re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """Code and its output."""

    code: str
    output: str


def snippets(path: Path) -> list[Snippet]:
    """Every marked example of a document; fails if a mark has no example."""
    text = path.read_text(encoding="utf-8")
    found = [Snippet(match["code"], match["output"]) for match in _SNIPPET.finditer(text)]
    assert len(found) == text.count("<!-- tested: "), f"{path} marks an example it does not have"
    return found
