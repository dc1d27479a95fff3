import json
from pathlib import Path

from typer.testing import Result


def last_json(result: Result) -> dict:
    """The object on the last line of standard output."""
    return json.loads(result.stdout.splitlines()[-1])


def read_records(path: Path) -> list[dict]:
    """The lines of an output, each of which must be whole JSON."""
    text = path.read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def write_lines(path: Path, lines: list[object]) -> Path:
    """One JSON value a line; text is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path
