"""Caps that decrease linearly with depth (PyramidKV, Cai et al. 2024, section 4.2).

With C = cap - w, where w is the number of tokens every layer holds, and a prompt of n tokens:

    low = C // beta,  high = 2 C - low             if high >= n - w: high = n - w, low = 2 C - high
    layer l of L gets  high - l (high - low) / (L - 1) + w          a prompt below 2 C: all get cap

Differs from the paper: the published step is rounded down, which retains up to L (L - 1) / 2 tokens
more than L * cap. Here the largest fractions are rounded up and the total is exactly L * cap
(`rounding=published` gives the published numbers). The paper's w is the rule's window. Here it is
the tokens that a rule protects (sinks, recent, window), the tokens removed at an eviction, so that
the line applies to the retained tokens, and the edges of pieces. The line depends on the prompt
length only, with every schedule.
"""

from dataclasses import dataclass
from fractions import Fraction

from quire.errors import ConfigError, UnknownName
from quire.policies.budgets.base import Budget, Shape, share_out
from quire.policies.registry import register_budget

LARGEST_FRACTIONS, PUBLISHED = "largest_fractions", "published"
ROUNDINGS = (LARGEST_FRACTIONS, PUBLISHED)


@register_budget("pyramid")
@dataclass(frozen=True, slots=True)
class Pyramid(Budget):
    """Caps that decrease linearly from the first layer to the last.

    Attributes:
        beta: steepness; the last layer retains 1 / `beta` of the average.
        rounding: `largest_fractions` keeps the total; `published` may exceed it.
    """

    beta: int = 20
    rounding: str = LARGEST_FRACTIONS

    def __post_init__(self) -> None:
        if self.beta < 1:
            raise ConfigError(f"expected beta >= 1, got {self.beta}")
        if self.rounding not in ROUNDINGS:
            raise UnknownName("rounding of budget 'pyramid'", self.rounding, ROUNDINGS)

    def _is_flat(self, shape: Shape) -> bool:
        return shape.num_layers < 2 or shape.prompt_tokens < max(shape.cap, 2 * shape.spare)

    def min_cap(self, shape: Shape) -> int:
        return shape.least if self._is_flat(shape) else shape.least - 1 + self.beta

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        spare, held = shape.spare, shape.least - 1
        if self._is_flat(shape):
            return None
        if spare < self.beta:
            raise ConfigError(
                f"budget pyramid:beta={self.beta} gives the last layer no tokens besides the "
                f"{held} that every layer holds; raise cap from {shape.cap} to "
                f"{held + self.beta} or lower beta to {max(1, spare)}"
            )
        low, high = self._ends(spare, shape.prompt_tokens - held)
        return shape.of_layers([layer + held for layer in self._line(low, high, shape.num_layers)])

    def _ends(self, spare: int, prompt_tokens: int) -> tuple[int, int]:
        high = min(2 * spare - spare // self.beta, prompt_tokens)
        return 2 * spare - high, high

    def _line(self, low: int, high: int, num_layers: int) -> list[int]:
        if self.rounding == PUBLISHED:
            down = (high - low) // (num_layers - 1)
            return [high - layer * down for layer in range(num_layers)]
        step = Fraction(high - low, num_layers - 1)
        # the mean of a line is half the sum of its ends, and low + high is even
        return share_out(
            num_layers * (low + high) // 2, [high - layer * step for layer in range(num_layers)]
        )
