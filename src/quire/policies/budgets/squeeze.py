"""Smaller caps for the layers that change least (SqueezeAttention, Wang and Gan 2024, Algorithm 1).

During prefill each layer records the cosine between the residual stream before and after its
attention, averaged over tokens. The layers' cosines are clustered. The group with the highest
cosines, whose attention changes the stream least, keeps only `share` of its budget; the other
layers get the rest:

    C = cap - w,   w as in `pyramid`
    a layer of that group, of G layers     share C + w
    the others, of L layers                (L - G share) C / (L - G) + w

Worked: L = 4, cap = 100, nothing protected (w = 0), cosines 0.2 0.5 0.9 0.91, three groups: the
last two layers form one group, so 0.3 * 100 = 30 each, and (4 - 2 * 0.3) * 100 / 2 = 170 for each
other.

Differs from the paper: the tokens that every layer must hold (w) are not divided. The clusters are
the optimum in one dimension, not the result of a k-means run. Rounding the largest fractions up
keeps the total exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import ResidualSimilarity, Statistic
from quire.policies.base import ScorePolicy
from quire.policies.budgets.base import Budget, Shape, decimal_fraction, share_out
from quire.policies.registry import register_budget
from quire.policies.view import KVView


@register_budget("squeeze")
@dataclass(frozen=True, slots=True)
class Squeeze(Budget):
    """Layers whose attention changes little get a fraction of their budget, the others the rest.

    Attributes:
        share: fraction of its budget that such a layer keeps; the paper's p, 0.3 to 0.4 there.
        groups: number of clusters of layers; the one that changes least is reduced.
    """

    needs_prompt = True

    share: float = 0.3
    groups: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"expected 0 < share <= 1, got {self.share}")
        if self.groups < 2:
            raise ConfigError(f"expected 2 groups or more, got {self.groups}")

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (ResidualSimilarity(),)

    def min_cap(self, shape: Shape) -> int:
        return shape.least - 1 + ceil(1 / decimal_fraction(self.share))

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        share, layers = decimal_fraction(self.share), shape.num_layers
        if shape.cap < self.min_cap(shape):
            raise ConfigError(
                f"budget squeeze:share={self.share} gives some layers no tokens besides the "
                f"{shape.least - 1} that every layer holds; raise cap from {shape.cap} or raise "
                "share"
            )
        most = ceil(shape.spare * (layers - (layers - 1) * share)) + shape.least - 1
        return (most,) * shape.num_lanes

    def finalize(self, view: KVView, rule: ScorePolicy, shape: Shape) -> tuple[int, ...]:
        del rule
        first_heads = view.by_layer(view.statistic(ResidualSimilarity()))[:, 0, 0].double()
        if bool((first_heads[:, 1] < 1).any()):
            raise PolicyError(
                "budget squeeze needs the residual similarity of every layer, and some layer has "
                "recorded none; use another budget for this model, such as pyramid"
            )
        cosines = (first_heads[:, 0] / first_heads[:, 1]).tolist()
        giving = highest_cluster(cosines, self.groups)
        weights = self._weights(giving, shape.num_layers)
        caps = share_out(shape.num_layers * shape.spare, weights)
        return shape.of_layers([cap + shape.least - 1 for cap in caps])

    def _weights(self, giving: frozenset[int], layers: int) -> list[Fraction]:
        if len(giving) == layers:  # all equal
            return [Fraction(1)] * layers
        share = decimal_fraction(self.share)
        others = (layers - len(giving) * share) / (layers - len(giving))
        return [share if layer in giving else others for layer in range(layers)]


# Optimal clusters in one dimension, computed exactly, so that the result is deterministic.


def highest_cluster(numbers: Sequence[float], groups: int) -> frozenset[int]:
    """Return the group with the highest numbers in the optimal clustering.

    k-means in one dimension has an exact solution: groups are consecutive in sorted order, and the
    sum of squared distances from their means is smallest. Ties prefer the larger highest group.

    Args:
        numbers: numbers to group, in any order.
        groups: number of groups; fewer if there are fewer distinct numbers.

    Returns:
        Indices of the group's members in `numbers`; all if all numbers are equal.
    """
    order = sorted(range(len(numbers)), key=lambda i: (numbers[i], i))
    ranked = [numbers[i] for i in order]

    @cache
    def spread(start: int, end: int) -> float:
        mean = sum(ranked[start:end]) / (end - start)
        return sum((number - mean) ** 2 for number in ranked[start:end])

    @cache
    def tightest(end: int, parts: int) -> tuple[float, int]:
        """Cost of the first `end` numbers in `parts` groups, and where the last group starts."""
        if parts == 1:
            return spread(0, end), 0
        return min(
            (tightest(start, parts - 1)[0] + spread(start, end), start)
            for start in range(parts - 1, end)
        )

    parts = min(groups, len(set(numbers)))
    return frozenset(order[tightest(len(ranked), parts)[1] :])
