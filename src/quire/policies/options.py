"""Options of rules and budgets: fields of their dataclasses, parsed from text."""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, TypeVar

from quire.errors import ConfigError, UnknownName, nearest

KINDS = (bool, int, float, str)  # an option's type is its default's
_WANTED = {int: "a whole number", float: "a finite number"}
_BOOLEANS = {"true": True, "false": False}
T = TypeVar("T")
Nested = Mapping[type, Callable[[str], object]]  # parsers of options that are rules themselves


def check_options(what: str, cls: type, *, taken: tuple[str, ...], nested: Nested) -> None:
    """Refuse a class whose fields cannot be options, or that lacks a method.

    Raises:
        ConfigError: the class is not a dataclass, a field has no default of an option type, a
            field uses a reserved name, or a method is abstract.
    """
    if "__dataclass_fields__" not in vars(cls):
        raise ConfigError(f"{what} is not a dataclass: write @register above @dataclass")
    for declared in fields(cls):
        if declared.name in taken:
            raise ConfigError(
                f"option {declared.name!r} of {what} is reserved for the schedule; rename the field"
            )
        if type(declared.default) not in KINDS and not isinstance(declared.default, tuple(nested)):
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise ConfigError(f"option {declared.name!r} of {what} needs a default of type {kinds}")
    for method in sorted(getattr(cls, "__abstractmethods__", ())):
        near = nearest(method, [name for name, value in vars(cls).items() if callable(value)])
        hint = f"it has {near[0]}, did you mean {method}?" if near else f"define {method}"
        raise ConfigError(f"{what} (class {cls.__name__}) has no method {method}: {hint}")


def make_with_options(
    what: str, cls: type[T], options: Mapping[str, str], *, others: tuple[str, ...], nested: Nested
) -> T:
    """Build a rule or budget from options given as text.

    Args:
        what: name for messages, such as "policy 'h2o'".
        cls: a dataclass that `check_options` accepts.
        options: options of this class only.
        others: options that are handled elsewhere, offered as suggestions in errors.
        nested: parsers of options that are rules.

    Raises:
        UnknownName: an option is not known; lists the nearest names.
        ConfigError: a value has the wrong type, or the class refuses it.
    """
    declared: dict[str, Field[Any]] = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    values = {}
    for key, value in options.items():
        if key not in declared:
            raise UnknownName(f"option of {what}", key, (*declared, *others))
        values[key] = _convert(key, value, declared[key].default, nested)
    return cls(**values)


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
        raise ValueError("options must be finite")
    return value


def check_at_least(least: int, **options: int | float) -> None:
    """Refuse options that are below their minimum.

    Raises:
        ConfigError: names the option.
    """
    for name, value in options.items():
        if value < least:
            raise ConfigError(f"expected {name} >= {least}, got {value}")


def without_parentheses(value: str) -> str:
    """Strip the parentheses around a nested rule."""
    value = value.strip()
    return value[1:-1] if value.startswith("(") and value.endswith(")") else value
