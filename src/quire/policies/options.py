"""Options of rules and budgets: the fields of their dataclasses, read from text."""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from quire.errors import ConfigError, UnknownName

KINDS = (bool, int, float, str)  # an option's type is its default's
_WANTED = {int: "a whole number", float: "a finite number"}
_BOOLEANS = {"true": True, "false": False}
T = TypeVar("T")
Nested = Mapping[type, Callable[[str], object]]  # of options that are rules themselves


def check_options(what: str, made: type, *, taken: tuple[str, ...], nested: Nested) -> None:
    """Refuse a class whose fields cannot be options.

    Raises:
        ConfigError: it is no dataclass, or a field has no default of an option's type, or a name
            that is taken.
    """
    if "__dataclass_fields__" not in vars(made):
        raise ConfigError(f"{what} is no dataclass: write @register above @dataclass")
    for declared in fields(made):
        if declared.name in taken:
            raise ConfigError(f"option {declared.name!r} of {what} is the schedule's own")
        if type(declared.default) not in KINDS and not isinstance(declared.default, tuple(nested)):
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise ConfigError(f"option {declared.name!r} of {what} needs a default of type {kinds}")


def make_with_options(
    what: str, made: type[T], options: Mapping[str, str], *, others: tuple[str, ...], nested: Nested
) -> T:
    """Build it from options as text.

    Args:
        what: for messages, such as "policy 'h2o'".
        made: a dataclass that `check_options` accepts.
        options: of it alone.
        others: options that are understood elsewhere, to be offered too.
        nested: how options that are rules are read.

    Raises:
        UnknownName: an option is not known; offers the nearest names.
        ConfigError: a value of the wrong type, or one that the class refuses.
    """
    declared: dict[str, Field[Any]] = {f.name: f for f in fields(made)}  # type: ignore[arg-type]
    values = {}
    for key, value in options.items():
        if key not in declared:
            raise UnknownName(f"option of {what}", key, (*declared, *others))
        values[key] = _convert(key, value, declared[key].default, nested)
    return made(**values)


def _convert(key: str, value: str, default: object, nested: Nested) -> object:
    for kind, read in nested.items():
        if isinstance(default, kind):
            return read(without_parentheses(value))
    kind = type(default)
    if kind is bool:
        if value not in _BOOLEANS:
            raise ConfigError(f"option {key} needs true or false, got {value!r}")
        return _BOOLEANS[value]
    try:
        return _finite(kind(value))  # type: ignore[call-arg]
    except ValueError:
        raise ConfigError(f"option {key} needs {_WANTED[kind]}, got {value!r}") from None


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("no option means anything at infinity or NaN")
    return value


def check_at_least(least: int, **options: int | float) -> None:
    """Refuse options that are below what they may be.

    Raises:
        ConfigError: names the option.
    """
    for name, value in options.items():
        if value < least:
            raise ConfigError(f"expected {name} >= {least}, got {value}")


def without_parentheses(value: str) -> str:
    """A nested rule without what stands around it."""
    value = value.strip()
    return value[1:-1] if value.startswith("(") and value.endswith(")") else value
