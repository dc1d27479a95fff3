"""Byte sizes as people write them: `64MiB` is binary, `8MB` is decimal, `4096` is bytes."""

import re
from decimal import Decimal

from quire.errors import ConfigError

_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of a size.

    Args:
        text: an integer of bytes, or digits with a unit: B, kB, MB, GB, TB (powers of 1000),
            KiB, MiB, GiB, TiB (powers of 1024). Case does not matter. A part of a byte is dropped.

    Raises:
        ConfigError: negative, or not a size.
    """
    if isinstance(text, bool):
        raise _not_a_size(text)
    if isinstance(text, int):
        if text < 0:
            raise _not_a_size(text)
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _not_a_size(text)
    number, unit = match.group(1), match.group(2).lower() or "b"
    if unit not in _UNITS:
        raise _not_a_size(text)
    return int(Decimal(number) * _UNITS[unit])


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
