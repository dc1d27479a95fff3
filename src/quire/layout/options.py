"""Options: dataclass fields that know their unit and their help.

Flags, the TOML file, the docs table and error messages are all made from these fields, so a
default or a sentence stands in one place.
"""

from dataclasses import dataclass, field, fields
from typing import Any, get_args

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """What a person should know about a field.

    Attributes:
        help: one sentence.
        unit: of the number, "" for names and counts that need none.
        flag: name on the command line where it differs from the field's.
    """

    help: str
    unit: str = ""
    flag: str | None = None


def option(default: Any, *, help: str, unit: str = "", flag: str | None = None) -> Any:
    """A dataclass field with a default, a help sentence and a unit."""
    return field(default=default, metadata={"option": OptionInfo(help, unit, flag)})


def require_types(config: Any) -> None:
    """Check every field of a config dataclass against its annotation.

    Raises:
        ConfigError: a value of another type; names the field.
    """
    for f in fields(config):
        require_type(f.name, getattr(config, f.name), *(get_args(f.type) or [f.type]))


def require_type(name: str, value: object, *kinds: type) -> None:
    """Check what a caller gave. An int passes for a float, a bool for nothing else.

    Raises:
        ConfigError: a value of another type.
    """
    allowed = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"expected {name} to be {names}, got {value!r}")
