"""Values of figures in stored results, in the results log, and in outputs of quick forms."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims.registry import Combine, Figure
from benchmarks.claims.sentences import stated_figures
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
    """The value of a figure in the unit of its sentence.

    Raises:
        ConfigError: a key does not exist, or the value has no number.
    """
    try:
        combined = _COMBINED[figure.combine]([lookup(key) for key in figure.keys])
    except ZeroDivisionError as error:
        raise ConfigError(f"expected a divisor other than 0 at {figure.keys}") from error
    return combined * figure.scale


def lookup_in(path: Path) -> Lookup:
    """Lookup in a stored result: a JSON file, or sentences of a Markdown file.

    Raises:
        ConfigError: the file does not exist.
    """
    if not path.is_file():
        raise ConfigError(f"expected a stored result, {path.name} does not exist")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return lambda sentence: stated_figures(text, sentence)[0].value
    stored = json.loads(text)
    return lambda key: number_at(stored, key)


def number_at(result: Any, key: str) -> float:
    """The number at a path such as `claims/run_s` or `arms/speed/tables/0/rows/2/4`.

    Raises:
        ConfigError: a name or index does not exist, or the value is no number.
    """
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
