"""Tables whose columns are functions of the measured objects."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from benchmarks.common.result import Cell, Table
from quire.cli.tables import seconds, show_table
from quire.layout.sizes import format_size

Row = TypeVar("Row")
_RATES = {"flops": (1e9, "GFLOP/s"), "bytes": (1e9, "GB/s")}
_SECONDS = re.compile(r"_s(_\d+)?$")


def table_of(
    name: str, caption: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], Cell]]
) -> Table:
    """One row for each object; columns are given by their titles."""
    return Table(
        name=name,
        caption=caption,
        columns=tuple(columns),
        rows=tuple(tuple(value(row) for value in columns.values()) for row in rows),
    )


def show_claims(title: str, claims: Mapping[str, int | float]) -> None:
    """Print claims with the units that their names end with."""
    rows = ((name, with_unit(name, value)) for name, value in claims.items())
    show_table(title, ("claim", "value"), rows)


def with_unit(name: str, value: int | float) -> str:
    """Format a value with the unit in the name of its claim, such as run_s or kv_peak_bytes."""
    if name.endswith("_bytes"):
        return format_size(int(value))
    if name.endswith("_per_s"):
        counted = name.removesuffix("_per_s").rpartition("_")[2]
        if counted in _RATES:
            scale, unit = _RATES[counted]
            return f"{value / scale:,.1f} {unit}"
        return f"{value:,.1f} {counted}/s"
    if _SECONDS.search(name):
        return seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
