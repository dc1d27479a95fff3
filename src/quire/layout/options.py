"""Options: dataclass fields that know their help, their unit, their group and their choices.

Flags, `--help`, the TOML file, the docs table and error messages are all made from these fields,
so everything about an option stands in one place:

    dtype: Dtype = option("auto", help="format of the weights", common=True)

A field that is a `Literal` shows its choices and refuses other values. `check_options` is called
in `__post_init__`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from quire.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """What a person should know about a field.

    Attributes:
        help: one sentence; empty where the class documents its attributes.
        unit: of the number, "" for names and counts that need none.
        flag: name on the command line where it differs from the field's.
        group: heading in `--help`; empty: the heading of the whole config.
        common: whether `--help` shows it; `--help-all` shows every option.
    """

    help: str = ""
    unit: str = ""
    flag: str | None = None
    group: str = ""
    common: bool = False


def option(
    default: Any,
    *,
    help: str = "",
    unit: str = "",
    flag: str | None = None,
    group: str = "",
    common: bool = False,
) -> Any:
    """A dataclass field with a default and what `OptionInfo` says about it."""
    info = OptionInfo(help=help, unit=unit, flag=flag, group=group, common=common)
    return field(default=default, metadata={"option": info})


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The values of a `Literal`; empty for any other type."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def check_options(config: Any) -> None:
    """Check every field of a config dataclass against its annotation.

    Raises:
        ConfigError: a value of another type, or none of the choices; names the option.
    """
    for f in fields(config):
        value, choices = getattr(config, f.name), choices_of(f.type)
        if choices:
            info = f.metadata.get("option", OptionInfo())
            require_choice(info.flag or f.name.replace("_", "-"), value, choices)
        else:
            require_type(f.name, value, *(get_args(f.type) or [f.type]))


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Check that a value is one of an option's choices.

    Args:
        name: of the option, such as "kv-store".
        value: what a caller gave.
        choices: what is allowed.

    Raises:
        ConfigError: another value; offers the nearest choices.
    """
    known = tuple(choices)
    if value not in known:
        near = nearest(value, known) if isinstance(value, str) else []
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"expected {name} to be one of {', '.join(known)}, got {value!r}{hint}")


def require_type(name: str, value: object, *kinds: type) -> None:
    """Check what a caller gave. An int passes for a float, a bool for nothing else.

    Raises:
        ConfigError: a value of another type.
    """
    allowed = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"expected {name} to be {names}, got {value!r}")
