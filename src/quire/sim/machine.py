"""The simulated machine, with rates from a data sheet or measured rates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final, Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.options import check_options, option
from quire.plan.ceilings import Ceilings

# Rates of a simulated machine: memory reads, matrix products and copies per second.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates that determine the duration of a step.

    Raises:
        ConfigError: a rate of 0 or less, or a negative overhead.
    """

    read_bytes_per_s: float  # memory, for weights and KV
    flops_per_s: float  # matrix products
    copy_bytes_per_s: float  # between device and host, for swapped KV
    overhead_s: float = 0.0  # of every step: scheduling, launches, sampling

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            min_is_fine = field.name == "overhead_s" and value == 0
            if not (0 < value < math.inf or min_is_fine):
                raise ConfigError(f"expected {field.name} above 0, got {value}")

    def scaled(self, efficiency: int | float) -> "Rates":
        """Return these rates multiplied by a fraction (0 to 1)."""
        if not 0 < efficiency <= 1:
            raise ConfigError(f"expected an efficiency above 0 and up to 1, got {efficiency}")
        return replace(
            self,
            read_bytes_per_s=self.read_bytes_per_s * efficiency,
            flops_per_s=self.flops_per_s * efficiency,
            copy_bytes_per_s=self.copy_bytes_per_s * efficiency,
        )


AUTO: Final = "auto"
PROFILE: Final = "profile"
ASSUMED: Final = "a100"
MachineName = Literal["auto", "a100", "h100", "h200", "profile"]
REACHED_OF_PEAKS = 0.6
"""Fraction of a data sheet's peaks that steps reach. This is assumed: decode steps of engines read
at 60 to 80 % of the memory's peak, and prefills multiply at 40 to 60 % of the products'."""

PEAKS: Mapping[str, Rates] = {
    "a100": Rates(read_bytes_per_s=2.039e12, flops_per_s=312e12, copy_bytes_per_s=31.5e9),
    "h100": Rates(read_bytes_per_s=3.35e12, flops_per_s=989e12, copy_bytes_per_s=63e9),
    "h200": Rates(read_bytes_per_s=4.8e12, flops_per_s=989e12, copy_bytes_per_s=63e9),
}
"""Peaks of data sheets: SXM cards of 80, 80 and 141 GB, dense products in 16 bits, and PCIe 4.0 or
5.0 with 16 lanes."""


@no_type_check  # run-time type checks in tests must not replace Quire's own errors
@dataclass(frozen=True, slots=True, kw_only=True)
class MachineConfig:
    """Options of the simulated machine."""

    name: MachineName = option(
        "auto",
        help="machine to simulate; profile: this machine, as measured by `quire profile`; auto: "
        f"profile if it was measured, else {ASSUMED}",
        flag="machine",
        common=True,
    )
    efficiency: float | None = option(
        None,
        help=f"fraction (above 0, up to 1) of the machine's rates that steps reach; unset: "
        f"{REACHED_OF_PEAKS} for peak rates of a data sheet, 1 for measured rates",
    )
    step_overhead_ms: float = option(
        2.0, help="overhead of every step in addition to memory and compute time", unit="ms"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            raise ConfigError(f"expected an efficiency above 0 and up to 1, got {self.efficiency}")
        if not 0 <= self.step_overhead_ms < 1e6:
            raise ConfigError(f"expected step_overhead_ms from 0, got {self.step_overhead_ms}")

    def rates(self, measured: Rates | None = None) -> Rates:
        """The rates that steps reach; `measured` are those of this machine, for `profile`."""
        peaks = PEAKS.get(ASSUMED if self.name == AUTO else self.name, measured)
        assert peaks is not None, "a measured machine needs its rates"
        return replace(peaks.scaled(self._reached), overhead_s=self.step_overhead_ms / 1000)

    @property
    def _reached(self) -> float:
        usual = 1.0 if self.name == PROFILE else REACHED_OF_PEAKS
        return usual if self.efficiency is None else self.efficiency

    def text(self, rates: Rates) -> str:
        """A line that names the machine and the rates that steps reach."""
        source = "this machine as measured" if self.name == PROFILE else "peaks of a data sheet"
        return (
            f"machine: {self.name} ({self._reached:.0%} of {source}): reads "
            f"{rates.read_bytes_per_s / 1e9:,.0f} GB/s, products "
            f"{rates.flops_per_s / 1e12:,.1f} TFLOP/s"
        )


def measured_rates(ceilings: Ceilings, dtype: str) -> Rates:
    """Convert the measurements of `quire profile` to rates."""
    return Rates(
        read_bytes_per_s=ceilings.read_bytes_per_s,
        flops_per_s=ceilings.peak_product_rate(dtype),
        copy_bytes_per_s=ceilings.copy_bytes_per_s,
    )
