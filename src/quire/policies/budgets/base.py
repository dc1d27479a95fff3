"""What a budget is: a frozen dataclass that divides `cap` tokens a lane over layers and heads.

    knows before the prompt is read     lane_caps   pyramid, scissors, by hand
    looks once, when it has been read   settle      squeeze, lazy, fastgen
    looks at every eviction             divide      ada: slots move between the heads of a layer

The total is kept, the caps of all lanes add up to lanes * cap, unless `keeps_total` says otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.layout.statistics import Statistic

if TYPE_CHECKING:
    from quire.policies.base import ScorePolicy
    from quire.policies.view import KVView

UNBOUNDED = 1 << 40
"""The cap of a lane that keeps everything."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is divided.

    Every lane holds `least - 1` tokens that no budget can take from it: those the rule protects,
    those that leave at an eviction, and the edges of pieces. What is left of the cap, `spare`, is
    what budgets divide: so no lane's cap falls below `least`.

    Attributes:
        cap: tokens of a lane on average.
        leaving: tokens by which a lane is under its cap after an eviction: `every`, or 0 where the
            cache is cut once.
        num_layers: layers that evict (those with a sliding window do not).
        heads: KV heads of a layer.
        prompt_tokens: tokens of the prompt.
        least: tokens below which a lane's cap may not fall.
        piece_tokens: neighbouring slots that stay or go together.
    """

    cap: int
    leaving: int
    num_layers: int
    heads: int
    prompt_tokens: int
    least: int
    piece_tokens: int = 1

    @property
    def num_lanes(self) -> int:
        """Lanes of a sequence."""
        return self.num_layers * self.heads

    @property
    def spare(self) -> int:
        """Tokens of a lane that can be divided: the cap without what every lane must hold."""
        return self.cap - (self.least - 1)

    def of_layers(self, caps: Sequence[int]) -> tuple[int, ...]:
        """The cap of each lane, from those of the layers."""
        return tuple(cap for cap in caps for _ in range(self.heads))


class Budget:
    """Divides a cap. Subclasses are frozen dataclasses; their fields are options."""

    needs_prompt: ClassVar[bool] = False
    """Whether it looks at the whole prompt's cache (`settle`): no eviction while that is read."""
    ragged: ClassVar[bool] = False
    """Whether it moves slots between the heads of a layer at each eviction (`divide`)."""
    by_head: ClassVar[bool] = False
    """Whether the heads of a layer can get unequal caps: not for rules with one set a layer."""
    keeps_total: ClassVar[bool] = True
    """Whether caps add up to lanes * cap; otherwise lanes may be UNBOUNDED."""

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What it has remembered beside what the rule needs."""
        return ()

    def lane_caps(self, shape: Shape) -> tuple[int, ...] | None:
        """Caps of all lanes, layer-major, before anything is read; None: the same for all.

        A budget that `needs_prompt` gives the most each lane may get, which is what is reserved
        until it has looked.

        Raises:
            ConfigError: they cannot be divided so; says why.
        """
        del shape
        return None

    def finalize(self, view: "KVView", rule: "ScorePolicy", shape: Shape) -> tuple[int, ...]:
        """Caps of all lanes, once the whole prompt is in the cache; UNBOUNDED keeps everything.

        Args:
            view: all lanes, with the statistics of the rule and the budget.
            rule: whose scores are to be used.
            shape: what is divided.
        """
        raise NotImplementedError

    def divide(
        self,
        view: "KVView",
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
    ) -> Int[Tensor, " lane"]:
        """Slots to keep in each lane: no fewer than are protected, no more than it holds.

        Args:
            view: whole layers.
            score: of the rule.
            protected: slots that stay.
            keep: of each lane, were they not moved; a lane may hold less by now.

        Returns:
            For every layer the same total as `keep`, or all that its lanes hold.
        """
        del view, score, protected
        return keep


@dataclass(frozen=True, slots=True)
class Uniform(Budget):
    """The same cap for every lane."""


# ---- shares --------------------------------------------------------------------------------------

# Whole tokens from fractions of them, the total kept: the largest fractions are rounded up.


def share_out(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Divide whole tokens in proportion to weights.

    Each gets its share rounded down; what is left goes, one each, to those who lost most by that.

        share_out(10, [3, 2, 1]): shares 5, 3 1/3, 1 2/3; down 5, 3, 1; one left, to 2/3: 5, 3, 2

    Args:
        total: tokens.
        weights: none negative, not all zero.

    Returns:
        As many numbers as weights, `total` together; of equal fractions the first is rounded up.
    """
    of_all = sum(weights)
    shares = [Fraction(total * weight) / of_all for weight in weights]
    whole = [int(share) for share in shares]
    by_loss = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i], i))
    for i in by_loss[: total - sum(whole)]:
        whole[i] += 1
    return whole


def decimal_fraction(number: float) -> Fraction:
    """The number as it is written: 0.2 is 1/5, not the nearest binary fraction."""
    return Fraction(repr(number))
