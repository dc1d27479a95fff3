"""Important tokens, and some of the rest that stand for the others: what KVCrush's forms share.

    budget left after protection    B = B_imp + B_rep
    important                       the B_imp best by the mean over query heads
    grouped                         the rest, of whom B_rep stand for all

The signature spans the heads of a layer, so a layer has one kept set.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError
from quire.layout.statistics import Statistic
from quire.policies.base import LAYER, EvictionPolicy, ScorePolicy
from quire.policies.best import Floats, best_slots
from quire.policies.h2o import H2O
from quire.policies.signatures.anchors import Signatures
from quire.policies.signatures.query_heads import apart, by_query_head, first_heads
from quire.policies.signatures.units import Marks, Units
from quire.policies.view import KVView

_MOST_ASKED = 1 << 20
"""Where a lane must hold so many tokens, no cap will do: what else is protected is not asked."""


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
    def scope(self) -> str:
        return LAYER

    @property
    def scores_heads(self) -> bool:
        return False  # one set a layer: nothing to wrap once more

    @property
    def rerotates_keys(self) -> bool:
        return self.base.rerotates_keys

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return apart(self.base.statistics)

    @property
    def least_cap(self) -> int:
        return self.least_retained()

    @abstractmethod
    def least_free(self, piece_tokens: int) -> int:
        """Tokens beside the protected ones of which some are a representative."""

    @abstractmethod
    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        """[layer] how many of the free units that stay stand for others.

        Args:
            units: of some layers.
            sums: [layer, unit] what they score.
        """

    @abstractmethod
    def represent(self, requested: "Asked", grouped: Marks, count: NDArray[np.int64]) -> Marks:
        """Choose `count` of the grouped units of each layer, or all where there are no more.

        Args:
            requested: what the base rule says.
            grouped: [layer, unit] those that are not important.
            count: [layer].
        """

    def least_retained(self, piece_tokens: int = 1) -> int:
        edges = 2 * piece_tokens if piece_tokens > 1 else 0
        free = self.least_free(piece_tokens)
        keep = self.base.least_cap - 1 + free
        while keep < _MOST_ASKED:  # what is protected may grow with what is kept, as half of it
            slots = torch.arange(2 * keep)[None]
            held = int(self._base.protected(KVView(slots, 2 * keep), torch.tensor([keep])).sum())
            if held + free <= keep:
                break
            keep = held + free
        return keep + edges

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
        score = heads.by_layer(base.checked_score(heads))
        layers, keep = first_heads(view), view.first_heads(keep)
        protected = base.checked_protected(layers, keep, piece_tokens)
        return Asked(base, view, layers, heads, score, protected, keep, piece_tokens)

    def stays(self, requested: "Asked") -> Bool[Tensor, "lane slot"]:
        """What is important, and what stands for the rest."""
        units = requested.units
        sums = units.sums(requested.mean_score)
        count = self.num_representatives(units, sums)
        stays = units.best(sums, units.room - count)
        if count.any():
            stays |= self.represent(requested, units.free & ~stays, count)
        kept = units.spread(stays, requested.view.heads_per_layer)
        return kept.to(requested.score.device)

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
        layers: the same, a lane for each layer.
        heads: the same, a lane for each query head.
        score: the base rule's, of every query head.
        protected: slots that stay, the same for all heads of a layer.
        keep: of each layer.
        piece_tokens: neighbouring slots that stay or go together.
        known: bits that were written down before, and where; None: nothing was.
    """

    base: ScorePolicy
    view: KVView
    layers: KVView
    heads: KVView
    score: Float[Tensor, "layer head slot"]
    protected: Bool[Tensor, "layer slot"]
    keep: Int[Tensor, " layer"]
    piece_tokens: int = 1
    known: tuple[Bool[Tensor, "layer head slot"], Bool[Tensor, "layer head slot"]] | None = None

    @cached_property
    def units(self) -> Units:
        """What stays or goes together."""
        live, protected, keep = map(on_host, (self.layers.live, self.protected, self.keep))
        return Units.of(live, protected & live, keep, self.piece_tokens)

    @property
    def may_leave(self) -> Bool[Tensor, "layer slot"]:
        """Slots that are not protected, in layers that lose any."""
        loses = self.keep < self.layers.num_slots[:, 0]
        return self.layers.live & ~self.protected & loses[:, None]

    @cached_property
    def mean_score(self) -> Floats:
        """[layer, column] the mean of the scores over the query heads of a layer."""
        return self._mean(self.score)

    @property
    def mean_accumulated(self) -> Floats:
        """[layer, column] the same before division by the queries that have seen each slot."""
        flat = self.base.accumulated(self.heads, self.score.flatten(0, 1))
        return self._mean(self.heads.by_layer(flat))

    def _mean(self, numbers: Float[Tensor, "layer head slot"]) -> Floats:
        mean: Floats = on_host(numbers[:, :, self.units.columns].mean(dim=1))
        return mean

    @cached_property
    def bits(self) -> Bool[Tensor, "layer head column"]:
        """Would this query head alone, with the whole budget, keep the token? Of what may leave."""
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
        must = self.protected & self.layers.live
        bits = must[:, None].repeat(1, self.score.shape[1], 1)
        bits[:, :, self.units.columns] |= self.bits
        return bits if self.known is None else torch.where(self.known[1], self.known[0], bits)

    def _best_of_heads(self) -> Bool[Tensor, "layer head column"]:
        """Each head's best beside what is protected: what may leave is the same for all of them."""
        units = self.units
        shared = (units.free_slots[:, None], units.wanted_slots[:, None])
        free, wanted = (torch.from_numpy(part).to(self.score.device) for part in shared)
        return best_slots(self.score[:, :, units.columns], free, wanted)

    def _chosen_by_heads(self) -> Bool[Tensor, "layer head slot"]:
        """What each head keeps by a rule that chooses in a way of its own."""
        heads = self.score.shape[1]
        protected = self.protected.repeat_interleave(heads, dim=0)
        keep = self.keep.repeat_interleave(heads)
        chosen = self.base.choose(self.heads, self.score.flatten(0, 1), protected, keep)
        return self.heads.by_layer(chosen)

    def signatures(self, grouped: Marks) -> Signatures:
        """The bits of a layer's query heads, of each unit."""
        return Signatures(self.units.side_by_side(on_host(self.bits)), grouped, self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers in the model; counted from 0 where the view names none."""
        return self.view.layers or tuple(range(len(self.score)))


def on_host(numbers: Tensor) -> NDArray[Any]:
    """A tensor as an array, on CPUs the same memory."""
    array: NDArray[Any] = numbers.cpu().numpy()
    return array


def _mean_over_layer(
    score: Float[Tensor, "head slot"], heads: KVView
) -> Float[Tensor, "layer slot"]:
    return heads.by_layer(torch.where(heads.live, score, 0.0)).mean(dim=1)
