"""Structured outputs of one request: a JSON schema, a regular expression, choices or a grammar.

Only the form and the size are checked here. `quire.sampling.grammar` compiles the grammar.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, no_type_check

from quire.errors import RequestError
from quire.layout.options import Parsed, option

MAX_GRAMMAR_BYTES = 1 << 17
"""Limit of a schema or grammar and of all choices together, in bytes of UTF-8."""

MAX_REGEX_BYTES = 1 << 14
MAX_NESTING = 64
"""Limit of the nesting depth of a JSON schema."""

MAX_CHOICE_VALUES = 4096
MAX_WHITESPACE_PATTERN_BYTES = 256

FIELD = "structured_outputs"
KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""The options of which exactly one must be set."""


@no_type_check  # type checks in tests must not replace the errors of `__post_init__`
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The structure that an output must have, with the names of vLLM; set exactly one of five.

    Attributes:
        json: a JSON schema, as an object or as JSON text; the output is JSON that matches it.
        json_object: the output is any JSON object.
        regex: a regular expression that the whole output matches.
        choice: texts of which the output is one.
        grammar: a grammar in the Lark format of llguidance, or in GBNF.
        disable_any_whitespace: no whitespace between the elements of JSON.
        whitespace_pattern: regular expression of the whitespace between elements of JSON. Default:
            up to 32 characters of any whitespace.

    Raises:
        RequestError: none or several of the five are set, or a value is invalid or too large.
    """

    json: Parsed[str | Mapping[str, Any] | None, str | None] = option(None)
    json_object: bool = False
    regex: str | None = None
    choice: Parsed[Sequence[str] | None, tuple[str, ...] | None] = option(None)
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        for name, checked in _CHECKS.items():
            value = getattr(self, name)
            unset = False if name in _FLAGS else None
            object.__setattr__(self, name, unset if value is None else checked(name, value))
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            raise RequestError(
                f"expected exactly one of {', '.join(KINDS)} in {FIELD}, got {found}", param=FIELD
            )
        if self.whitespace_pattern is None:
            return
        if self.disable_any_whitespace or self.kind not in ("json", "json_object"):
            raise _error(
                "whitespace_pattern",
                "whitespace_pattern needs json or json_object, without disable_any_whitespace: "
                "leave it out",
            )

    @property
    def kind(self) -> str:
        """Which of the five options is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def param(self) -> str:
        """Name of the field that sets the structure, for errors."""
        return f"{FIELD}.{self.kind}"


def as_structured_outputs(name: str, value: object) -> StructuredOutputs:
    """Return structured outputs; a mapping is converted.

    Args:
        name: name of the option.
        value: value of the option.

    Raises:
        RequestError: neither StructuredOutputs nor a mapping of its options.
    """
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(
            f"expected {name} to be an object with one of {', '.join(KINDS)}, got "
            f"{type(value).__name__}",
            param=name,
        )
    known = {one.name for one in fields(StructuredOutputs)}
    for key, member in value.items():
        if key not in known and member not in (None, False):
            raise RequestError(
                f"{name} has no option {str(key)[:40]!r}: expected {', '.join(sorted(known))}",
                param=name,
            )
    return StructuredOutputs(**{key: value[key] for key in known & value.keys()})


def _error(name: str, message: str) -> RequestError:
    return RequestError(message, param=f"{FIELD}.{name}")


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _error(name, f"expected {name} to be true or false, got {type(value).__name__}")
    return value


def _text(max_bytes: int) -> Callable[[str, object], str]:
    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise _error(
                name, f"expected {name} to be a text that is not empty, got {_kind(value)}"
            )
        _check_size(name, value, max_bytes)
        return value

    return check


def _kind(value: object) -> str:
    return "an empty text" if value == "" else type(value).__name__


def _check_size(name: str, text: str, max_bytes: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise _error(name, f"{name} is not valid Unicode: {error.reason}") from None
    if size > max_bytes:
        raise _error(name, f"expected {name} of at most {max_bytes:,} bytes, got {size:,}")


def _schema(name: str, value: object) -> str:
    """Check a JSON schema and return it as JSON text."""
    schema = value
    if isinstance(value, str):
        _check_size(name, value, MAX_GRAMMAR_BYTES)
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _error(
                name, f"expected a JSON schema in {name}, got invalid JSON: {error}"
            ) from None
    if not isinstance(schema, Mapping | bool):
        raise _error(
            name, f"expected {name} to be a JSON schema (an object), got {type(schema).__name__}"
        )
    if nesting_depth(schema) > MAX_NESTING:
        raise _error(
            name, f"expected a JSON schema nested at most {MAX_NESTING} levels deep, got more"
        )
    _refuse_min_integer(name, schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _error(name, f"expected {name} to be a JSON schema: {error}") from None
    _check_size(name, text, MAX_GRAMMAR_BYTES)
    return text


def _refuse_min_integer(name: str, schema: object) -> None:
    """Refuse numbers from about -2^63 down: llguidance crashes on such a range of integers."""
    values = [schema]
    while values:
        value = values.pop()
        if isinstance(value, int | float) and value <= -(2**63 - 512):  # -2^63 in float64
            raise _error(name, f"expected numbers above -2^63 in {name}, got {value}")
        values += _inside(value)


def nesting_depth(schema: object) -> int:
    """Nesting depth of a value, counted to one level above the limit."""
    level: list[object] = [schema]
    depth = 0
    while level and depth <= MAX_NESTING:
        level = [inner for value in level for inner in _inside(value)]
        depth += 1
    return depth


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _choices(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _error(name, f"expected {name} to be a list of texts, got {type(value).__name__}")
    texts = tuple(value)
    if not 1 <= len(texts) <= MAX_CHOICE_VALUES:
        raise _error(
            name, f"expected 1 to {MAX_CHOICE_VALUES:,} texts in {name}, got {len(texts):,}"
        )
    if not all(isinstance(text, str) and text for text in texts):
        raise _error(name, f"expected {name} to be a list of texts, none of them empty")
    _check_size(name, "".join(texts), MAX_GRAMMAR_BYTES)
    return texts


_FLAGS = ("json_object", "disable_any_whitespace")
_CHECKS: dict[str, Callable[[str, object], object]] = {
    "json": _schema,
    "json_object": _flag,
    "regex": _text(MAX_REGEX_BYTES),
    "choice": _choices,
    "grammar": _text(MAX_GRAMMAR_BYTES),
    "disable_any_whitespace": _flag,
    "whitespace_pattern": _text(MAX_WHITESPACE_PATTERN_BYTES),
}
