"""Caps that increase linearly with depth (Scissorhands, Liu et al. 2023, section 4.3).

With C = cap - w, where w is the number of tokens every layer holds (see `pyramid`), layer l of L
gets

    C (1 + slope (2 l / (L - 1) - 1)) + w          from C (1 - slope) + w up to C (1 + slope) + w

Differs from the paper: it gives later layers more, since attention persists less there, without
specifying how much; the linear form is Quire's.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from quire.errors import ConfigError
from quire.policies.budgets.base import Budget, Shape, decimal_fraction, share_out
from quire.policies.registry import register_budget


@register_budget("scissors")
@dataclass(frozen=True, slots=True)
class Scissors(Budget):
    """Caps that increase linearly from the first layer to the last.

    Attributes:
        slope: steepness, 0 (equal caps) or more and below 1 (almost no tokens in the first layer).
    """

    slope: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.slope < 1:
            raise ConfigError(f"expected 0 <= slope < 1, got {self.slope}")

    def min_cap(self, shape: Shape) -> int:
        first = 1 - decimal_fraction(self.slope) if shape.num_layers > 1 else 1
        return shape.least - 1 + ceil(1 / first)

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        if shape.num_layers < 2:
            return None
        slope, last = decimal_fraction(self.slope), shape.num_layers - 1
        if shape.cap < self.min_cap(shape):
            raise ConfigError(
                f"budget scissors:slope={self.slope} gives the first layer no tokens besides the "
                f"{shape.least - 1} that every layer holds; raise cap from {shape.cap} or lower "
                "slope"
            )
        weights = [1 + slope * (Fraction(2 * layer, last) - 1) for layer in range(last + 1)]
        caps = share_out(shape.num_layers * shape.spare, weights)
        return shape.of_layers([cap + shape.least - 1 for cap in caps])
