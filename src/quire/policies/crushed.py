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
from quire.policies.choose import best_slots, count_true
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
        return Asked(base, view, heads, heads.by_layer(score), protected, keep, piece_tokens)

    def stays(self, asked: "Asked") -> Bool[Tensor, "lane slot"]:
        """What is important, and what stands for the rest."""
        units = asked.units
        sums = units.sums(asked.mean_score)
        count = self.num_representatives(units, sums)
        stays = units.best(sums, units.room - count)
        if bool(count.any()):
            stays |= self.represent(asked, units.free & ~stays, count)
        return units.spread(stays, asked.view.heads_per_layer)

    @property
    def _base(self) -> ScorePolicy:
        assert isinstance(self.base, ScorePolicy), "checked when it was made"
        return self.base


@dataclass(frozen=True)
class Asked:
    """What is known of some layers when representatives are chosen.

    Attributes:
        base: the rule.
        view: the sequence.
        heads: the same, a lane for each query head.
        score: the base rule's, of every query head.
        protected: slots that stay, the same for all heads of a layer.
        keep: of each lane, likewise.
        piece_tokens: neighbouring slots that stay or go together.
        known: bits that were written down before, and where; None: nothing was.
    """

    base: ScorePolicy
    view: KVView
    heads: KVView
    score: Float[Tensor, "layer head slot"]
    protected: Bool[Tensor, "lane slot"]
    keep: Int[Tensor, " lane"]
    piece_tokens: int = 1
    known: tuple[Bool[Tensor, "layer head slot"], Bool[Tensor, "layer head slot"]] | None = None

    @cached_property
    def must(self) -> Bool[Tensor, "layer slot"]:
        """What is protected, of each layer."""
        return self.view.first_heads(self.protected & self.view.live)

    @cached_property
    def units(self) -> Units:
        """What stays or goes together."""
        live, keep = self.view.first_heads(self.view.live), self.view.first_heads(self.keep)
        return Units.of(live, self.must, keep, self.piece_tokens)

    @cached_property
    def mean_score(self) -> Float[Tensor, "layer column"]:
        """The mean of the scores over the query heads of a layer, of the slots between."""
        return self.score[:, :, self.units.columns].mean(dim=1)

    @cached_property
    def bits(self) -> Bool[Tensor, "layer head column"]:
        """Would this query head alone, with the whole budget, keep the token?"""
        columns = self.units.columns
        if type(self.base).choose is ScorePolicy.choose:
            fresh = self._best_of_heads()
        else:
            fresh = self._chosen_by_heads()[:, :, columns]
        if self.known is None:
            return fresh
        bits, signed = self.known
        return torch.where(signed[:, :, columns], bits[:, :, columns], fresh)

    @property
    def all_bits(self) -> Bool[Tensor, "layer head slot"]:
        """The same of all slots; what is protected every head would keep."""
        bits = self.units.live[:, None].repeat(1, self.score.shape[1], 1)
        if self.known is not None:
            bits = torch.where(self.known[1], self.known[0], bits)
        bits[:, :, self.units.columns] = self.bits
        return bits

    def _best_of_heads(self) -> Bool[Tensor, "layer head column"]:
        """What is protected, and each head's best: what may leave is the same for all of them."""
        columns = self.units.columns
        must = self.must[:, columns]
        free = self.units.live[:, columns] & ~must
        wanted = self.view.first_heads(self.keep) - count_true(self.must)
        best = best_slots(self.score[:, :, columns], free[:, None], wanted.clamp_min(0)[:, None])
        return best | must[:, None]

    def _chosen_by_heads(self) -> Bool[Tensor, "layer head slot"]:
        """What each head keeps by a rule that chooses in a way of its own."""
        group = self.view.group
        protected = self.protected.repeat_interleave(group, dim=0)
        keep = self.keep.repeat_interleave(group)
        chosen = self.base.choose(self.heads, self.score.flatten(0, 1), protected, keep)
        return self.heads.by_layer(chosen)

    def signatures(self, grouped: Bool[Tensor, "layer unit"]) -> Signatures:
        """The bits of a layer's query heads, of each unit."""
        return Signatures(self.units.side_by_side(self.bits), grouped, self.layers)

    @property
    def layers(self) -> Int[Tensor, " layer"]:
        """Numbers of the layers."""
        return self.view.first_heads(self.view.lane_layers)


def _mean_over_layer(
    score: Float[Tensor, "head slot"], heads: KVView
) -> Float[Tensor, "layer slot"]:
    return heads.by_layer(torch.where(heads.live, score, 0.0)).mean(dim=1)
