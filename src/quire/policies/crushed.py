"""Important tokens, and some of the rest that stand for the others: what KVCrush's forms share.

    budget left after protection    B = B_imp + B_rep
    important                       the B_imp best by the mean over query heads
    grouped                         the rest, of whom B_rep stand for all

The signature spans the heads of a layer, so a layer has one kept set.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.base import LAYER, EvictionPolicy, ScorePolicy
from quire.policies.choose import choose_slots
from quire.policies.h2o import H2O
from quire.policies.signatures.anchors import Signatures
from quire.policies.signatures.query_heads import apart, by_query_head
from quire.policies.signatures.units import Units
from quire.policies.view import KVView
from quire.spec.statistics import Statistic


@dataclass(frozen=True, slots=True)
class Crushed(ScorePolicy):
    """Keeps what a base rule finds important, and representatives of what it does not.

    Attributes:
        base: the rule; what it protects stays protected. It must look at queries or keys.
        seed: of what is drawn by lot.
    """

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.base, ScorePolicy) or not self.base.scores_heads:
            raise ConfigError(
                f"{type(self).__name__} asks every query head which tokens it would keep, and "
                f"{type(self.base).__name__} does not tell heads apart; use a base such as h2o, "
                "snapkv or expected_attention"
            )

    @property
    def grain(self) -> str:
        return LAYER

    @property
    def scores_heads(self) -> bool:
        return False  # one set a layer: nothing to wrap once more

    @property
    def renumbers(self) -> bool:
        return self.base.renumbers

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return apart(self.base.statistics)

    @property
    def least_cap(self) -> int:
        return self.least_kept()

    @abstractmethod
    def least_free(self, piece_tokens: int) -> int:
        """Tokens beside the protected ones of which some are a representative."""

    @abstractmethod
    def num_representatives(
        self, units: Units, sums: Float[Tensor, "layer unit"]
    ) -> Int[Tensor, " layer"]:
        """How many of the free units that stay stand for others.

        Args:
            units: of some layers.
            sums: what they score.
        """

    @abstractmethod
    def represent(
        self, asked: "Asked", grouped: Bool[Tensor, "layer unit"], count: Int[Tensor, " layer"]
    ) -> Bool[Tensor, "layer unit"]:
        """Choose `count` of the grouped units of each layer, or all where there are no more."""

    def least_kept(self, piece_tokens: int = 1) -> int:
        edges = 2 * piece_tokens if piece_tokens > 1 else 0
        free = self.least_free(piece_tokens)
        keep = self.base.least_cap - 1 + free
        while True:  # what is protected may grow with what is kept: half of it are the newest
            slots = torch.arange(2 * keep)[None]
            held = int(self._base.protected(KVView(slots, 2 * keep), torch.tensor([keep])).sum())
            if held + free <= keep:
                return keep + edges
            keep = held + free

    # ---- choosing ------------------------------------------------------------------------------

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """The mean over the layer's query heads of what the base rule says."""
        heads = by_query_head(view, self._base.statistics)
        mean = _mean_over_layer(self._base.checked_score(heads), heads)
        return mean.repeat_interleave(view.heads_per_layer, dim=0)

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        return self._base.protected(view, keep)

    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        return self.stays(self.ask(view, keep, piece_tokens))

    def ask(self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int) -> "Asked":
        """What the base rule says."""
        base, heads = self._base, by_query_head(view, self._base.statistics)
        score = base.checked_score(heads)
        # each end of what is protected may widen to a whole piece
        protected = self.checked_protected(view, keep - 2 * (piece_tokens - 1))
        units = Units.of(view, protected, keep, piece_tokens)
        mean = _mean_over_layer(score, heads)
        return Asked(view, heads, score, mean, protected, keep, units)

    def stays(self, asked: "Asked") -> Bool[Tensor, "lane slot"]:
        """What is important, and what stands for the rest."""
        units = asked.units
        sums = units.sums(asked.mean_score)
        count = self.num_representatives(units, sums)
        important = units.best(sums, units.room - count)
        grouped = units.free & ~important
        return units.spread(
            important | self.represent(asked, grouped, count), asked.view.heads_per_layer
        )

    @property
    def _base(self) -> ScorePolicy:
        assert isinstance(self.base, ScorePolicy), "checked when it was made"
        return self.base


@dataclass(frozen=True)
class Asked:
    """What is known of some layers when representatives are chosen.

    Attributes:
        view: the sequence.
        heads: the same, a lane for each query head.
        score: the base rule's, of every query head.
        mean_score: its mean over the query heads of a layer.
        protected: slots that stay.
        keep: of each lane.
        units: what stays or goes together.
        known: bits that were written down before, and where; None: nothing was.
    """

    view: KVView
    heads: KVView
    score: Float[Tensor, "head slot"]
    mean_score: Float[Tensor, "layer slot"]
    protected: Bool[Tensor, "lane slot"]
    keep: Int[Tensor, " lane"]
    units: Units
    known: tuple[Bool[Tensor, "head slot"], Bool[Tensor, "head slot"]] | None = None

    @cached_property
    def bits(self) -> Bool[Tensor, "head slot"]:
        """Would this query head alone, with the whole budget, keep the token?"""
        group = self.view.group
        protected = self.protected.repeat_interleave(group, dim=0)
        keep = self.keep.repeat_interleave(group)
        fresh = choose_slots(self.score, self.heads.live, protected, keep)
        if self.known is None:
            return fresh
        bits, signed = self.known
        return torch.where(signed, bits, fresh)

    def signatures(self, grouped: Bool[Tensor, "layer unit"]) -> Signatures:
        """The bits of a layer's query heads, of each unit."""
        bits = self.heads.by_layer(self.bits).transpose(1, 2)
        return Signatures(self.units.side_by_side(bits), grouped, self.layers)

    @property
    def layers(self) -> Int[Tensor, " layer"]:
        """Numbers of the layers."""
        return self.view.lane_layers[:: self.view.heads_per_layer]


def would_keep(
    score: Float[Tensor, "head slot"],
    live: Bool[Tensor, "head slot"],
    protected: Bool[Tensor, "head slot"],
    keep: Int[Tensor, " head"],
) -> Bool[Tensor, "head slot"]:
    """Slots that heads would keep if each decided alone."""
    from quire.policies.choose import choose_slots

    return choose_slots(score, live, protected, keep)


def _mean_over_layer(
    score: Float[Tensor, "head slot"], heads: KVView
) -> Float[Tensor, "layer slot"]:
    return heads.by_layer(torch.where(heads.live, score, 0.0)).mean(dim=1)
