"""Values that JSON or TOML can have and that cannot be used: refused where a text is parsed."""

import json
import math
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError

if sys.platform != "win32":
    import resource

MAX_FILES = 1 << 16
"""Open files that a process asks for, if the system allows more."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: every connection needs a file.

    Many systems start a process with 1,024, fewer than the streams of a busy server or benchmark.
    """
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


MAX_BITS = 64
"""Limit of integers in options and TOML files."""

MAX_LEVELS = 256
"""Limit of lists and objects inside each other: later steps use several calls for each level."""

_MAX_PATH = 100  # characters: clients choose the keys
_MAX_INTEGER = int(1.7976931348623157e308)  # of float64


@dataclass(frozen=True, slots=True)
class Fault:
    """An unusable value.

    Attributes:
        path: keys and indices, such as messages.0.content; "" for the whole value.
        problem: what is expected, and what was given.
    """

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}" if self.path else self.problem


def find_fault(value: object) -> Fault | None:
    """The first unusable value inside a parsed value; None if there is none.

    It is a string or key that UTF-8 cannot encode, a number that float64 cannot hold, or a value
    inside too many lists and objects.
    """
    found = _find(value, MAX_LEVELS)
    if found is None:
        return None
    *steps, problem = found
    path = ".".join(reversed(steps)).encode("utf-8", "backslashreplace").decode()
    return Fault(path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}...", problem)


def _find(value: object, levels: int) -> list[str] | None:
    """The problem, preceded by its path, the innermost key first."""
    if isinstance(value, str):
        return None if value.isascii() else _text_problem(value)
    if isinstance(value, int):
        if -_MAX_INTEGER <= value <= _MAX_INTEGER:
            return None
        return ["expected a number of at most 1.8e308, got an integer of more than 308 digits"]
    if isinstance(value, float):
        return (
            None if math.isfinite(value) else [f"expected a finite number, got {json.dumps(value)}"]
        )
    if not isinstance(value, dict | list):
        return None
    if not levels:
        return [f"expected lists and objects nested at most {MAX_LEVELS} levels deep, got more"]
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if type(key) is int and type(inner) is int and -_MAX_INTEGER <= inner <= _MAX_INTEGER:
            continue  # a token id: a body has millions of them
        found = _find(key, 0) if isinstance(key, str) else None
        found = found or _find(inner, levels - 1)
        if found is not None:
            return [*found[:-1], str(key), found[-1]]
    return None


def _text_problem(text: str) -> list[str] | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = f"character {error.start + 1}, {text[error.start]!r}"
        return [f"the text is not Unicode: {shown}, is half of a surrogate pair"]
    return None


def is_count(text: str) -> bool:
    """Whether a text has 1 to 18 decimal digits; Python refuses to read more than 4,300."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def read_toml(path: Path, name: str) -> dict[str, object]:
    """Read a TOML file of options.

    Args:
        path: the file.
        name: what the file is, for errors.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has an integer of more than 64 bits or
            a NUL character, which no option takes.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name} {path}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{name} {path} is not TOML: it is nested too deeply") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path} is not TOML: {error}") from None
    except ValueError:  # Python's limit on digits
        raise ConfigError(f"{name} {path}: an integer has more than 4,300 digits") from None
    for key, value in _leaves(content):
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise ConfigError(
                f"{name} {path}: expected {key} as an integer of at most {MAX_BITS} bits, got "
                f"{value.bit_length():,} bits"
            )
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{name} {path}: expected {key} without NUL characters")
    return content


def _leaves(content: dict[str, object]) -> Iterator[tuple[str, object]]:
    """All values of a table with their keys; not recursive: dotted keys nest without a limit."""
    inside: list[tuple[str, object]] = list(content.items())
    while inside:
        key, value = inside.pop()
        if isinstance(value, dict):
            inside += ((f"{key}.{name}"[:_MAX_PATH], inner) for name, inner in value.items())
        elif isinstance(value, list):
            inside += ((key, inner) for inner in value)
        else:
            yield key, value
