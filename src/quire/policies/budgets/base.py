"""Interface of a budget: a frozen dataclass that divides `cap` tokens per lane.

    fixed before prefill            lane_capacities   pyramid, scissors, by_layer, duo
    set from the prompt's cache     finalize    squeeze, lazy, fastgen
    set at every eviction           divide      ada: moves slots between the heads of a layer

`finalize` runs once, after prefill, if no token is evicted during prefill. With
`when=prefill_and_decode` and `when=pressure` it runs at each eviction until the prompt is computed:
the first division is an estimate from the first blocks, and later ones refine it. A lane that
retains few tokens is then measured on these tokens only.

The caps of all lanes add up to lanes * cap, unless `keeps_total` is False. With `Shape.bounded`
they never add up to more.
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
"""The cap of a lane that never evicts."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The cap to divide, and the lanes to divide it over.

    Every lane holds `least - 1` tokens that no budget can take from it: the tokens the rule
    protects, the tokens removed at an eviction, and the edges of pieces. Budgets divide the rest of
    the cap, `spare`, so no lane's cap falls below `least`.

    Attributes:
        cap: tokens of a lane on average.
        leaving: number of tokens by which a lane is below its cap after an eviction: `every`, or 0
            if the cache is cut once.
        num_layers: layers that evict (those with a sliding window do not).
        heads: KV heads of a layer.
        prompt_tokens: tokens of the prompt.
        least: minimum cap of a lane, in tokens.
        piece_tokens: neighbouring slots that are evicted together.
        bounded: whether the caps of all lanes may add up to at most lanes * cap.
        head_dim: elements of a head; 0 if unknown.
    """

    cap: int
    leaving: int
    num_layers: int
    heads: int
    prompt_tokens: int
    least: int
    piece_tokens: int = 1
    bounded: bool = False
    head_dim: int = 0

    @property
    def num_lanes(self) -> int:
        """Lanes of a sequence."""
        return self.num_layers * self.heads

    @property
    def spare(self) -> int:
        """Tokens per lane that can be divided: the cap without the tokens every lane must hold."""
        return self.cap - (self.least - 1)

    def of_layers(self, caps: Sequence[int]) -> tuple[int, ...]:
        """Expand caps of layers to caps of lanes."""
        return tuple(cap for cap in caps for _ in range(self.heads))

    def within_total(self, caps: Sequence[int]) -> tuple[int, ...]:
        """Replace UNBOUNDED caps by equal shares of what the others leave of the total cap.

        Args:
            caps: caps of all lanes, or of all layers; each is at most `cap` or UNBOUNDED.
        """
        others = [cap for cap in caps if cap != UNBOUNDED]
        unbounded = len(caps) - len(others)
        left = len(caps) * self.cap - sum(others)
        shares = iter(share_out(left, [1] * unbounded) if unbounded else ())
        return tuple(next(shares) if cap == UNBOUNDED else cap for cap in caps)


class Budget:
    """Divides a cap. Subclasses are frozen dataclasses; their fields are options."""

    needs_prompt: ClassVar[bool] = False
    """Whether it reads the prompt's cache (`finalize`)."""
    ragged: ClassVar[bool] = False
    """Whether slots move between the heads of a layer at each eviction (`divide`)."""
    by_head: ClassVar[bool] = False
    """Whether the heads of a layer can get unequal caps; excludes rules with one set per layer."""
    example: ClassVar[str] = ""
    """Options that it needs, for quire-tiny; "" if it needs none."""
    keeps_total: ClassVar[bool] = True
    """Whether caps add up to lanes * cap; if not, lanes may be UNBOUNDED."""

    @property
    def in_tokens(self) -> bool:
        """Whether the budget names tokens, so that the cap must be a number of tokens or bytes."""
        return False

    @property
    def file(self) -> str:
        """File that the budget reads, "" for none; requests may name only those of the engine."""
        return ""

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics that the budget needs in addition to those of the rule."""
        return ()

    def min_cap(self, shape: Shape) -> int:
        """Return the smallest cap that leaves `shape.least` tokens or more to every lane.

        A cap in percent is raised to it.
        """
        return shape.least

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        """Return the caps of all lanes, layer-major, before prefill; None: equal caps.

        A budget with `needs_prompt` returns the maximum each lane may get; this is reserved until
        `finalize`. It is not reserved if `shape.bounded`: lanes are equal until the first eviction.

        Raises:
            ConfigError: the cap cannot be divided; the message states the reason.
        """
        del shape
        return None

    def finalize(self, view: "KVView", rule: "ScorePolicy", shape: Shape) -> tuple[int, ...]:
        """Return the caps of all lanes after prefill; UNBOUNDED disables eviction in a lane.

        With `shape.bounded`, part of the prompt may not be computed, lanes may hold different
        numbers of tokens, and no cap is UNBOUNDED.

        Args:
            view: all lanes, with the statistics of the rule and the budget.
            rule: the rule whose scores are used.
            shape: the cap to divide.
        """
        raise NotImplementedError

    def divide(
        self,
        view: "KVView",
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
    ) -> Int[Tensor, " lane"]:
        """Return the slots to retain in each lane, between the protected and the held number.

        Args:
            view: whole layers.
            score: scores of the rule.
            protected: slots that are always retained.
            keep: slots to retain in each lane if none are moved; a lane may hold fewer.

        Returns:
            The same total as `keep` for every layer, or all slots that its lanes hold.
        """
        del view, score, protected
        return keep


# Rounding to whole tokens with an exact total: the largest fractions are rounded up.


def share_out(total: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Divide whole tokens in proportion to weights.

    Each share is rounded down. The remaining tokens go, one each, to the largest fractions.

        share_out(10, [3, 2, 1]): shares 5, 3 1/3, 1 2/3; down 5, 3, 1; one left, to 2/3: 5, 3, 2

    Args:
        total: tokens.
        weights: none negative, not all zero.

    Returns:
        One number per weight, adding up to `total`; ties round the first up.
    """
    of_all = sum(weights)
    shares = [Fraction(total * weight) / of_all for weight in weights]
    whole = [int(share) for share in shares]
    by_loss = sorted(range(len(whole)), key=lambda i: (whole[i] - shares[i], i))
    for i in by_loss[: total - sum(whole)]:
        whole[i] += 1
    return whole


def decimal_fraction(number: float) -> Fraction:
    """Convert a float to the fraction of its decimal text: 0.2 is 1/5."""
    return Fraction(repr(number))
