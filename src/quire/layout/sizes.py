"""Sizes and fractions as text: `64MiB` is binary, `8MB` is decimal, `4096` is bytes."""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import TypeGuard

from quire.errors import ConfigError

HUGE_PAGE_BYTES = 2 << 20  # a large page of the operating system

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_MIN_WITHOUT_UNIT = 1024
"""Smallest size without a unit: no memory is smaller, so the unit of such a number is missing."""
_MAX_BITS = 63
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: object) -> int:
    """Parse a size; return bytes.

    Args:
        text: an integer of bytes, or digits with a unit: B, kB, MB, GB, TB (powers of 1000),
            KiB, MiB, GiB, TiB (powers of 1024), case-insensitive. Fractions of a byte are dropped.
            Text of digits alone from 1 to 1023 is refused: vLLM's --swap-space 4 means 4 GiB.

    Raises:
        ConfigError: the size is negative, over 2^63 - 1 bytes, not a size, or a small number
            without a unit.
    """
    if isinstance(text, bool):
        raise _not_a_size(text)
    if isinstance(text, int):
        if not 0 <= text < 1 << _MAX_BITS:
            raise _not_a_size(text)
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise _not_a_size(text)
    number, unit = match.group(1), match.group(2).lower()
    if (unit or "b") not in _UNITS:
        raise _not_a_size(text)
    size_bytes = int(Decimal(number) * _UNITS[unit or "b"])
    if size_bytes >= 1 << _MAX_BITS:
        raise _not_a_size(text)
    if not unit and 0 < size_bytes < _MIN_WITHOUT_UNIT:
        raise ConfigError(
            f"expected a size with its unit, got {text!r}, which is {size_bytes} bytes: "
            f"write {size_bytes}GiB or {size_bytes}MiB, or {size_bytes}B if bytes are meant"
        )
    return size_bytes


def parse_size_or(word: str) -> Callable[[object], int | None]:
    """Return a parser of sizes that returns None for `word` and for None."""

    def parse(text: object) -> int | None:
        if text is None or text == word:
            return None
        try:
            return parse_size(text)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {word}") from error

    return parse


def parse_fraction(text: object) -> float | None:
    """Parse a fraction (0 to 1); return 0 for `off`, None for `auto` and None.

    Raises:
        ConfigError: the value has another form or is out of range.
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
    """Format a size for display: `1.50 GiB`; whole bytes below 1 KiB."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


def rounded_size(num_bytes: int) -> int:
    """Round up to whole KiB, from 1 MiB on to quarters of a MiB, from 64 MiB on to whole MiB."""
    unit = 2**10 if num_bytes < 2**20 else 2**18 if num_bytes < 64 * 2**20 else 2**20
    return -(-num_bytes // unit) * unit


def option_size(num_bytes: int) -> str:
    """Format a size of `rounded_size` as the value of an option: 100KiB, 12.5MiB or 182MiB."""
    return f"{num_bytes // 2**10}KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:.10g}MiB"


def _not_a_size(text: object) -> ConfigError:
    is_long = isinstance(text, int) and text.bit_length() > _MAX_BITS
    shown = "an integer of more than 63 bits" if is_long else f"{text!r:.60}"
    return ConfigError(
        f"{shown} is not a size: expected a number of bytes from 0 to 2^63 - 1, such as 64MiB, "
        "1.5GiB, 8MB or 4096"
    )
