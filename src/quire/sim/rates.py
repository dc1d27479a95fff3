"""How fast a simulated machine is: what it reads, multiplies and copies in a second."""

import math
from dataclasses import dataclass, fields, replace

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What decides how long a step takes.

    Attributes:
        read_bytes_per_s: memory, for weights and KV.
        flops_per_s: matrix products.
        copy_bytes_per_s: between device and host, for swapped KV.
        overhead_s: of every step, whatever is in it: scheduling, launches, sampling.

    Raises:
        ConfigError: a rate of 0 or less, or a negative overhead.
    """

    read_bytes_per_s: float
    flops_per_s: float
    copy_bytes_per_s: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_fine = field.name == "overhead_s" and value == 0
            if not (0 < value < math.inf or least_is_fine):
                raise ConfigError(f"expected {field.name} above 0, got {value}")

    def scaled(self, efficiency: int | float) -> "Rates":
        """These rates as far as they are reached.

        Raises:
            ConfigError: a share outside of 0 to 1.
        """
        if not 0 < efficiency <= 1:
            raise ConfigError(f"expected an efficiency above 0 and up to 1, got {efficiency}")
        return replace(
            self,
            read_bytes_per_s=self.read_bytes_per_s * efficiency,
            flops_per_s=self.flops_per_s * efficiency,
            copy_bytes_per_s=self.copy_bytes_per_s * efficiency,
        )
