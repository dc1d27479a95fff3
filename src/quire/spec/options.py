"""Options: dataclass fields that know their unit and their help.

Flags, the TOML file, the docs table and error messages are all made from these fields, so a
default or a sentence stands in one place.
"""

from dataclasses import dataclass, field
from typing import Any


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
