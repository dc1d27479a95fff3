"""What a JSON value looks like: every path with its type, and its value where that must not change.

    {"choices": [{"finish_reason": "length", "text": "a"}]}

    choices[].finish_reason    str 'length'
    choices[].text             str

A whole number or a flag is kept with its value, a text only where its name says that programs
compare it (`EXACT_TEXTS`), a float never; of an option (`config`) all are kept. Patterns of a case
change this path by path.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

Shape = dict[str, str]

EXACT_TEXTS = frozenset(
    {
        *("object", "type", "param", "finish_reason", "stop_reason", "role", "owned_by"),
        *("code", "kind", "state", "how", "reason", "name", "task", "arm", "dtype", "medium"),
        *("codec", "group", "sharing", "exactness", "limit", "longest_limit", "mode"),
        *("retained", "promoted", "scope", "statistics", "url", "method"),
    }
)
"""Last names of paths whose texts are compared by programs."""

LOOSE = (
    *("*created", "hardware.*", "last_line.hardware.*", "*seconds", "*scratch_peak_bytes"),
    *("*_s", "*_per_s", "*.number"),
)
"""Numbers that differ from run to run or between machines."""

MAX_EQUAL = 4  # largest number of equal list values that are written one by one
EITHER = {"commit": "str or null", "cpu": "str"}
"""Last names of paths whose type depends on the machine."""


@dataclass(frozen=True)
class Rule:
    """Exceptions for the paths of one value, as `fnmatch` patterns."""

    exact: tuple[str, ...] = ()  # keep these values too
    loose: tuple[str, ...] = ()  # keep only the types of these
    maps: tuple[str, ...] = ()  # mappings whose keys depend on the machine: shown as "*"

    def is_exact(self, path: str, value: object) -> bool:
        if _matches(path, self.exact):
            return True
        if _matches(path, (*LOOSE, *self.loose)):
            return False
        if isinstance(value, str) and _in_config(path):
            return "/" not in value  # the others are files of this run
        if isinstance(value, str):
            return _last_name(path) in EXACT_TEXTS
        if isinstance(value, float):
            return _in_config(path)
        return isinstance(value, bool | int)


def shape_of(value: object, rule: Rule | None = None) -> Shape:
    """Path to type or value, sorted; several found at one path stand beside each other."""
    found: dict[str, set[str]] = {}
    for path, text in _leaves(value, "", rule or Rule()):
        found.setdefault(path, set()).add(text)
    return {path: " | ".join(sorted(texts)) for path, texts in sorted(found.items())}


def _leaves(value: Any, path: str, rule: Rule) -> Iterator[tuple[str, str]]:
    if _last_name(path) in EITHER:
        yield path, EITHER[_last_name(path)]
    elif isinstance(value, Mapping):
        yield from _of_mapping(value, path, rule)
    elif isinstance(value, list | tuple):
        yield from _of_list(value, path, rule)
    else:
        yield path, _text(value, exact=rule.is_exact(path, value))


def _of_mapping(value: Mapping[str, Any], path: str, rule: Rule) -> Iterator[tuple[str, str]]:
    if not value:
        yield path, "empty object"
    hides_keys = _matches(path, rule.maps)
    for key, inner in value.items():
        yield from _leaves(inner, f"{path}.{'*' if hides_keys else key}".lstrip("."), rule)


def _of_list(value: Sequence[Any], path: str, rule: Rule) -> Iterator[tuple[str, str]]:
    if not value:
        yield f"{path}[]", "empty"
    elif all(_is_plain(inner) and rule.is_exact(path, inner) for inner in value):
        yield path, _row(value)
    else:
        for inner in value:
            yield from _leaves(inner, f"{path}[]", rule)


def _row(values: Sequence[object]) -> str:
    """All of them: their order counts too."""
    if len(values) > MAX_EQUAL and len(set(values)) == 1:
        return f"{len(values)} x {values[0]!r}"
    return repr(list(values))


def _in_config(path: str) -> bool:
    return "config" in path.split(".")[:-1]


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | str)


def _text(value: object, *, exact: bool) -> str:
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return f"bytes of {len(value)}"
    kind = type(value).__name__
    return f"{kind} {value!r}" if exact else kind


def _matches(path: str, patterns: Sequence[str]) -> bool:
    # "[" opens a class of characters in a pattern: paths are compared without their lists
    return any(fnmatchcase(path.replace("[]", ""), pattern) for pattern in patterns)


def _last_name(path: str) -> str:
    return path.replace("[]", "").rpartition(".")[2]


def differences(expected: Shape, found: Shape) -> list[str]:
    lines = []
    for path in sorted(expected.keys() | found.keys()):
        before, now = expected.get(path), found.get(path)
        if before != now:
            lines += [f"- {path}: {before}"] * (before is not None)
            lines += [f"+ {path}: {now}"] * (now is not None)
    return lines
