"""Compare the figures of documents with stored results and with quick forms.

A value is a number in a JSON result, or a figure of a sentence of the results log. A quick form is
a command whose last line of standard output is one JSON object. What cannot be compared raises
`ConfigError`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.registry import Claim, Combine, Figure, QuickForm, stated_figures
from quire.errors import ConfigError

Lookup = Callable[[str], float]
"""The number at a key of a result."""

_COMBINED: dict[Combine, Callable[[Sequence[float]], float]] = {
    "value": lambda values: values[0],
    "sum": sum,
    "inverse": lambda values: 1 / sum(values),
    "ratio": lambda values: values[0] / values[1],
    "max": max,
    "min": min,
}


def measured(figure: Figure, lookup: Lookup) -> float:
    """The value of a figure in the unit of its sentence."""
    try:
        combined = _COMBINED[figure.combine]([lookup(key) for key in figure.keys])
    except ZeroDivisionError as error:
        raise ConfigError(f"expected a divisor other than 0 at {figure.keys}") from error
    return combined * figure.scale


def lookup_in(path: Path) -> Lookup:
    """Lookup in a stored result: a JSON file, or sentences of a Markdown file."""
    if not path.is_file():
        raise ConfigError(f"expected a stored result, {path.name} does not exist")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return lambda sentence: stated_figures(text, sentence)[0].value
    stored = json.loads(text)
    return lambda key: number_at(stored, key)


def number_at(result: Any, key: str) -> float:
    """The number at a path such as `claims/run_s` or `arms/speed/tables/0/rows/2/4`."""
    found = result
    for name in key.split("/"):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise ConfigError(f"expected the key {key!r}, no {name!r} in it")
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise ConfigError(f"expected a number at {key!r}, got {type(found).__name__}")
    return float(found)


_LONGEST_S = 600.0  # a busy machine is slower, but a quick form that hangs ends
_SHOWN_CHARACTERS = 500


def run_quick(form: QuickForm, root: Path) -> dict[str, Any]:
    """Run a command in the root of the checkout and parse the last line of its output."""
    paths = (str(root / "src"), str(root), os.environ.get("PYTHONPATH"))
    try:
        finished = subprocess.run(
            [sys.executable if word == "python" else word for word in form.command],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the command did not finish: {error}") from error
    if finished.returncode:
        shown = finished.stderr.strip()[-_SHOWN_CHARACTERS:]
        raise ConfigError(f"expected exit code 0, got {finished.returncode}: {shown}")
    last = finished.stdout.strip().rpartition("\n")[2]
    try:
        result = json.loads(last)
    except json.JSONDecodeError:
        result = None
    if not isinstance(result, dict):
        raise ConfigError(f"expected a JSON object as last line, got {last[:_SHOWN_CHARACTERS]!r}")
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison of a figure of a document with its measured value."""

    claim: str
    document: str
    sentence: str
    stated: str = ""  # in the document; "" if the sentence was not found
    measured: float | None = None  # in the unit of the sentence
    source: str  # stored result, or command of the quick form
    problem: str = ""  # why the figures could not be compared
    agrees: bool = False

    @property
    def text(self) -> str:
        """One line that names all that is needed to mend a disagreement."""
        found = self.problem or f"stated {self.stated}, measured {self.measured:.6g}"
        return f"{self.document}: {self.sentence!r} ({self.claim}): {found}; source: {self.source}"


def check_stored(claims: Sequence[Claim], root: Path) -> Iterator[Row]:
    """Compare each sentence with its stored result; a missing script is a problem too."""
    for claim in claims:
        if not (root / claim.script).is_file():
            problem = f"expected the script {claim.script}, it does not exist"
            yield _row(claim, claim.stored, problem=problem)
        try:
            lookup = lookup_in(root / claim.stored)
        except ConfigError as error:
            yield _row(claim, claim.stored, problem=str(error))
            continue
        yield from _compare(claim, root, lookup, claim.stored)


def check_quick(form: QuickForm, claims: Sequence[Claim], root: Path) -> Iterator[Row]:
    """Run a quick form, and compare the sentences of its claims with the output."""
    source = " ".join(form.command)
    try:
        result = run_quick(form, root)
    except ConfigError as error:
        yield from (_row(claim, source, problem=str(error)) for claim in claims)
        return
    for claim in claims:
        yield from _compare(claim, root, lambda key: number_at(result, key), source)


def _compare(claim: Claim, root: Path, lookup: Lookup, source: str) -> Iterator[Row]:
    try:
        text = (root / claim.document).read_text(encoding="utf-8")
        stated = stated_figures(text, claim.sentence)
    except (OSError, ConfigError) as error:
        yield _row(claim, source, problem=str(error))
        return
    for figure, found in zip(claim.figures, stated, strict=True):
        try:
            value = measured(figure, lookup)
        except ConfigError as error:
            yield _row(claim, source, stated=found.text, problem=str(error))
            continue
        agrees = found.agrees(value)
        yield _row(claim, source, stated=found.text, measured=value, agrees=agrees)


def _row(claim: Claim, source: str, **found: Any) -> Row:
    return Row(
        claim=claim.name, document=claim.document, sentence=claim.sentence, source=source, **found
    )
