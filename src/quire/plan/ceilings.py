"""Peak rates of this machine for reads, copies and matrix products, stored in a file.

`quire profile` measures them and writes the file. It is valid for one processor, number of threads
and torch version. For any other machine it is not used, and the reason is reported.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.layout.files import replace_file
from quire.plan.rates import (
    CopyRates,
    PrefillRates,
    StepRates,
    copies_from,
    prefill_from,
    steps_from,
)

FORMAT = 2
_OF_EARLIER = frozenset(
    {"one_thread_read_bytes_per_s", "one_thread_copy_bytes_per_s", "attention_bytes_per_s"}
)
"""Rates in files of earlier versions, which nothing uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a machine that ceilings depend on."""

    cpu: str
    threads: int  # torch's
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRate:
    """A measured matrix product [rows, inner] x [inner, columns]."""

    dtype: str
    rows: int
    inner: int
    columns: int
    flops_per_s: float  # two FLOPs for each multiply-add


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured rates of one machine."""

    machine: Machine
    read_bytes_per_s: float  # buffers larger than all caches, all threads
    copy_bytes_per_s: float  # a copy counts its bytes once
    products: tuple[ProductRate, ...]
    # rates of swapped pages, by device; empty in files of older versions
    copies: Mapping[str, CopyRates] = field(default_factory=dict)
    # by `model_key`; empty if no model was measured
    prefill: Mapping[str, PrefillRates] = field(default_factory=dict)
    # by `steps_key`; empty if no model was measured
    steps: Mapping[str, StepRates] = field(default_factory=dict)

    def peak_product_rate(self, dtype: str = "bfloat16") -> float:
        """In FLOP/s."""
        return max(product.flops_per_s for product in self._of_dtype(dtype))

    def product_rate(
        self, rows: int, inner: int, columns: int, *, dtype: str = "bfloat16"
    ) -> float:
        """Rate to expect of a product, in FLOP/s.

        Uses the measured matrix [inner, columns] with the nearest shape. The rate is interpolated
        over the logarithm of rows, and constant outside of the measured range.
        """
        if min(rows, inner, columns) < 1:
            raise ConfigError(f"expected sizes of 1 or more, got {rows}, {inner}, {columns}")
        products = self._of_dtype(dtype)
        nearest = min(products, key=lambda found: _distance(found, inner, columns))
        shape = (nearest.inner, nearest.columns)
        points = sorted((p.rows, p.flops_per_s) for p in products if (p.inner, p.columns) == shape)
        below = [point for point in points if point[0] <= rows]
        above = [point for point in points if point[0] >= rows]
        if not below or not above:
            return (below[-1] if below else above[0])[1]
        (low, low_rate), (high, high_rate) = below[-1], above[0]
        if low == high:
            return low_rate
        share = math.log(rows / low) / math.log(high / low)
        return low_rate + share * (high_rate - low_rate)

    def _of_dtype(self, dtype: str) -> list[ProductRate]:
        found = [product for product in self.products if product.dtype == dtype]
        if not found:
            measured = ", ".join(sorted({product.dtype for product in self.products})) or "none"
            raise ConfigError(f"no product was measured in {dtype}, only in: {measured}")
        return found


@dataclass(frozen=True, slots=True)
class NotUsable:
    """Stored ceilings that are not valid here, with the reason."""

    reason: str


def default_path(environment: Mapping[str, str]) -> Path:
    """Path of this machine's ceilings, in the user's cache folder."""
    named = environment.get("XDG_CACHE_HOME", "")
    # the XDG specification asks for relative paths to be ignored
    cache = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return cache / "quire" / "ceilings.json"


def write_ceilings(ceilings: Ceilings, path: Path) -> None:
    """Store ceilings atomically: concurrent readers see the whole old file or the whole new one."""
    text = json.dumps({"format": FORMAT} | asdict(ceilings), indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; name another file with --output"
        ) from error


def read_ceilings(path: Path, machine: Machine) -> Ceilings | NotUsable:
    """Read stored ceilings; `NotUsable` if they are not valid for `machine`."""
    again = "run `quire profile MODEL`"
    try:
        ceilings = ceilings_from(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return NotUsable(f"{path} does not exist: {again}")
    except OSError as error:
        return NotUsable(f"{path} cannot be read: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        return NotUsable(f"{path} is not a valid ceilings file ({error}): {again}")
    for part in fields(Machine):
        stored, here = getattr(ceilings.machine, part.name), getattr(machine, part.name)
        if stored != here:
            return NotUsable(f"{path} was measured with {part.name} {stored}, not {here}: {again}")
    return ceilings


def ceilings_from(stored: Any) -> Ceilings:
    """Parse the JSON object of a ceilings file."""
    values = dict(stored)
    if values.pop("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}")
    machine, products = values.pop("machine"), values.pop("products")
    copies, prefill = values.pop("copies", {}), values.pop("prefill", {})
    steps = values.pop("steps", {})
    if not isinstance(machine, dict) or not isinstance(products, list):
        raise TypeError("expected a table `machine` and a list `products`")
    rates = {name: _rate(value) for name, value in values.items() if name not in _OF_EARLIER}
    return Ceilings(
        machine=Machine(**machine),
        products=tuple(_product(product) for product in products),
        copies=copies_from(copies),
        prefill=prefill_from(prefill),
        steps=steps_from(steps),
        **rates,
    )


def _product(stored: Any) -> ProductRate:
    values = dict(stored)
    rate = _rate(values.pop("flops_per_s"))
    sizes = [values.pop(name) for name in ("rows", "inner", "columns")]
    rows, inner, columns = (size for size in sizes if isinstance(size, int) and size > 0)
    return ProductRate(
        dtype=str(values.pop("dtype")), rows=rows, inner=inner, columns=columns, flops_per_s=rate
    )


def _rate(value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"expected a rate above 0, got {value!r}")
    return float(value)


def _distance(found: ProductRate, inner: int, columns: int) -> float:
    return abs(math.log(found.inner / inner)) + abs(math.log(found.columns / columns))
