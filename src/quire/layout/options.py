"""Options: dataclass fields with help, unit, group and choices.

Flags, `--help`, the TOML file, the docs table and error messages are all generated from these
fields, so an option is defined in one place:

    dtype: Dtype = option("auto", help="format of the weights", common=True)

A field of a `Literal` type lists its choices and refuses other values. A field of a `Parsed` type
accepts text or a number and holds the parsed value: `memory="64MiB"` holds 67108864.
`check_options` does both, once, in `__post_init__`.
"""

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from quire.errors import ConfigError, UnknownName, nearest
from quire.layout.codecs import CodecSpec
from quire.layout.values import MAX_BITS

Accepted = TypeVar("Accepted")
Stored = TypeVar("Stored")


class Parsed(Generic[Accepted, Stored]):
    """Annotation of a field that accepts one type and holds another.

    Type checkers treat it as a descriptor, so `KVConfig(memory="64MiB")` and `kv.memory + 1` are
    both valid. At run time it is only an annotation; the field's `parse` converts the value.
    """

    def __get__(self, instance: object, owner: type | None = None) -> Stored:
        raise NotImplementedError

    def __set__(self, instance: object, value: Accepted) -> None:
        raise NotImplementedError


Size = Parsed[int | str, int]
"""Bytes, or a size such as "64MiB"; holds bytes."""
MaybeSize = Parsed[int | str | None, int | None]
"""A size, or a word such as auto; holds bytes, or None for the word."""
Fraction = Parsed[float | str | None, float | None]
"""A number from 0 to 1, off (0) or auto; holds the number, or None for auto."""


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """Metadata of an option.

    Attributes:
        help: one sentence; empty if the class documents its attributes.
        unit: unit of the number; "" for names and counts.
        flag: name on the command line if it differs from the field's name.
        group: heading in `--help`; empty for the heading of the whole config.
        common: whether `--help` shows the option; `--help-all` shows every option.
        parse: converts an input value to the field's value; also accepts converted values.
        synonyms: further names on the command line; those of one or two letters have one dash.
        metavar: placeholder of the value in `--help`; empty: the type.
        min_value, max_value: range of a number; None: not bounded.
    """

    help: str = ""
    unit: str = ""
    flag: str | None = None
    group: str = ""
    common: bool = False
    parse: Callable[[Any], Any] | None = None
    synonyms: tuple[str, ...] = ()
    metavar: str = ""
    min_value: int | float | None = None
    max_value: int | float | None = None


def option(  # noqa: PLR0913 - one parameter per attribute of the metadata
    default: Any,
    *,
    help: str = "",
    unit: str = "",
    flag: str | None = None,
    group: str = "",
    common: bool = False,
    parse: Callable[[Any], Any] | None = None,
    synonyms: tuple[str, ...] = (),
    metavar: str = "",
    min_value: int | float | None = None,
    max_value: int | float | None = None,
) -> Any:
    """Create a dataclass field with a default and the metadata of `OptionInfo`.

    The default `dataclasses.MISSING` makes an option that must be given.
    """
    info = OptionInfo(
        help=help,
        unit=unit,
        flag=flag,
        group=group,
        common=common,
        parse=parse,
        synonyms=synonyms,
        metavar=metavar,
        min_value=min_value,
        max_value=max_value,
    )
    return field(default=default, metadata={"option": info})


def config_of(annotation: Any) -> type | None:
    """Return the config dataclass that a field holds; None for any other field."""
    return annotation if isinstance(annotation, type) and is_dataclass(annotation) else None


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a `Literal`; empty for any other type."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def check_options(config: Any) -> None:
    """Parse and check every field of a config dataclass.

    Raises:
        ConfigError: a value cannot be parsed, has another type or is not among the choices; the
            message names the option.
    """
    for f in fields(config):
        value, choices = getattr(config, f.name), choices_of(f.type)
        info = f.metadata.get("option", OptionInfo())
        name = info.flag or f.name.replace("_", "-")
        if info.parse is not None:
            object.__setattr__(config, f.name, parse_named(info.parse, name, value))
        elif choices:
            require_choice(name, value, choices)
        elif get_origin(f.type) is tuple:
            object.__setattr__(config, f.name, texts_of(name, value))
        else:
            require_type(f.name, value, *(get_args(f.type) or [f.type]))
            _require_range(name, value, info)


def _require_range(name: str, value: Any, info: OptionInfo) -> None:
    low, high = info.min_value, info.max_value
    if value is None or ((low is None or value >= low) and (high is None or value <= high)):
        return
    span = f"{low} or more" if high is None else f"from {low} to {high}"
    raise ConfigError(f"expected {name} of {span}, got {value!r}")


def texts_of(name: str, value: object) -> tuple[str, ...]:
    """Return the texts of a repeatable option.

    Args:
        name: name of the option, without the leading dashes.
        value: a list or tuple of texts.

    Raises:
        ConfigError: another type, or an element that is not a text.
    """
    if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise ConfigError(f"expected {name} to be a list of texts, got {value!r:.80}")


def option_values(config: Any) -> dict[str, object]:
    """Return the fields of a config dataclass as JSON values.

    A codec becomes its name. A parsed value that is a dataclass, such as a URL, becomes its text.
    """
    return {f.name: _json_value(getattr(config, f.name), f) for f in fields(config)}


def _json_value(value: object, of: Field[Any]) -> object:
    if isinstance(value, CodecSpec):
        return value.name
    if not is_dataclass(value):
        return value
    return str(value) if get_origin(of.type) is Parsed else option_values(value)


def parse_named(parse: Callable[[Any], Stored], name: str, value: object) -> Stored:
    """Parse the value of an option; its errors begin with the option.

    Args:
        parse: parser, such as `quire.layout.sizes.parse_size`.
        name: name of the option, without the leading dashes.
        value: the value to parse.

    Raises:
        ConfigError: `parse` refuses the value.
    """
    try:
        return parse(value)
    except UnknownName:  # its message already names the unknown value
        raise
    except ConfigError as error:
        raise ConfigError(f"--{name}: {error}") from error


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Check that a value is one of an option's choices.

    Args:
        name: name of the option, such as "kv-store".
        value: the value to check.
        choices: the allowed values.

    Raises:
        ConfigError: the value is not among the choices; the message suggests the nearest ones.
    """
    known = tuple(choices)
    if value not in known:
        near = nearest(value, known) if isinstance(value, str) else []
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"expected {name} to be one of {', '.join(known)}, got {value!r}{hint}")


def require_type(name: str, value: object, *kinds: type) -> None:
    """Check the type of a value; an int is accepted as a float, a bool only as a bool.

    Raises:
        ConfigError: the value has another type, or is an integer of more than 64 bits.
    """
    allowed = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"expected {name} to be {names}, got {value!r}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError(f"expected {name} of at most {MAX_BITS} bits, got an integer with more")
