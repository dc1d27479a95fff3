"""Sizes and fractions as text: `64MiB` is binary, `8MB` is decimal, `4096` is bytes."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import TypeGuard

from quire.errors import ConfigError

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_LEAST_WITHOUT_UNIT = 1024
"""Fewer bytes than any memory here has: such a bare number was meant in another unit."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: object) -> int:
    """Bytes of a size.

    Args:
        text: an integer of bytes, or digits with a unit: B, kB, MB, GB, TB (powers of 1000),
            KiB, MiB, GiB, TiB (powers of 1024). Case does not matter. A part of a byte is dropped.
            A text of digits alone is refused from 1 to 1023: vLLM's --swap-space 4 is 4 GiB.

    Raises:
        ConfigError: negative, not a size, or a small number without its unit.
    """
    if isinstance(text, bool):
        raise _not_a_size(text)
    if isinstance(text, int):
        if text < 0:
            raise _not_a_size(text)
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise _not_a_size(text)
    number, unit = match.group(1), match.group(2).lower()
    if (unit or "b") not in _UNITS:
        raise _not_a_size(text)
    size_bytes = int(Decimal(number) * _UNITS[unit or "b"])
    if not unit and 0 < size_bytes < _LEAST_WITHOUT_UNIT:
        raise ConfigError(
            f"expected a size with its unit, got {text!r}, which is {size_bytes} bytes: "
            f"write {size_bytes}GiB or {size_bytes}MiB, or {size_bytes}B if bytes are meant"
        )
    return size_bytes


def parse_size_or(word: str) -> Callable[[object], int | None]:
    """A function that parses sizes, and gives None for a word or None."""

    def parse(text: object) -> int | None:
        if text is None or text == word:
            return None
        try:
            return parse_size(text)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {word}") from error

    return parse


def parse_fraction(text: object) -> float | None:
    """A number from 0 to 1; 0 for `off`, None for `auto` and None.

    Raises:
        ConfigError: anything else.
    """
    if text is None or text == "auto":
        return None
    try:
        fraction = 0.0 if text == "off" else float(text) if _is_number(text) else -1.0
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise ConfigError(f"expected auto, off or a fraction from 0 to 1, got {text!r}")
    return fraction


def _is_number(value: object) -> TypeGuard[str | float]:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def format_size(size_bytes: int) -> str:
    """A size for people: `1.50 GiB`; whole bytes below 1 KiB."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


def _not_a_size(text: object) -> ConfigError:
    return ConfigError(
        f"{text!r} is not a size: expected a number of bytes of 0 or more,"
        " such as 64MiB, 1.5GiB, 8MB or 4096"
    )
