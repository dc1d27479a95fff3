"""Important tokens, and representatives of the rest: the base class of KVCrush's variants.

    budget left after protection    B = B_imp + B_rep
    important                       the B_imp best by the mean over query heads
    grouped                         the rest, of which B_rep tokens are retained as representatives

A signature spans the heads of a layer, so each layer has one retained set.
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

_SEARCH_LIMIT = 1 << 20
"""Limit of the search for the least cap; no useful cap is larger."""


@dataclass(frozen=True, slots=True)
class Crushed(ScorePolicy):
    """Retains the tokens with a base rule's highest scores, and representatives of the rest.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: seed of random choices.
    """

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.base, ScorePolicy) or not self.base.scores_heads:
            raise ConfigError(
                f"{type(self).__name__} needs a base whose scores differ between query heads, got "
                f"{type(self.base).__name__}; use a base such as h2o, snapkv or expected_attention"
            )

    @property
    def scope(self) -> str:
        return LAYER

    @property
    def scores_heads(self) -> bool:
        return False  # one set per layer: cannot be the base of another such rule

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
        """Return the fewest unprotected tokens for which at least one is a representative."""

    @abstractmethod
    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        """Return how many of the retained free units of each layer are representatives, [layer].

        Args:
            units: units of some layers.
            sums: [layer, unit] scores of the units.
        """

    @abstractmethod
    def represent(
        self, context: "SelectionContext", grouped: Marks, count: NDArray[np.int64]
    ) -> Marks:
        """Select `count` of the grouped units of each layer, or all if there are fewer.

        Args:
            context: scores and bits of the base rule.
            grouped: [layer, unit] units that are not important.
            count: [layer] number of units to select.
        """

    def least_retained(self, piece_tokens: int = 1) -> int:
        edges = 2 * piece_tokens if piece_tokens > 1 else 0
        free = self.least_free(piece_tokens)
        keep = self.base.least_cap - 1 + free
        while keep < _SEARCH_LIMIT:  # the number of protected slots may grow with `keep`
            slots = torch.arange(2 * keep)[None]
            held = int(self._base.protected(KVView(slots, 2 * keep), torch.tensor([keep])).sum())
            if held + free <= keep:
                break
            keep = held + free
        return keep + edges

    # ---- selection -----------------------------------------------------------------------------

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Return the mean of the base rule's scores over the layer's query heads."""
        heads = by_query_head(view, self._base.statistics)
        mean = _mean_over_layer(self._base.checked_score(heads), heads)
        return mean.repeat_interleave(view.heads_per_layer, dim=0)

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        return self._base.protected(view, keep)

    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        return self.retained_slots(self.selection_context(view, keep, piece_tokens))

    def selection_context(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int
    ) -> "SelectionContext":
        """Run the base rule, and return its scores and protected slots."""
        base, heads = self._base, by_query_head(view, self._base.statistics)
        score = heads.by_layer(base.checked_score(heads))
        layers, keep = first_heads(view), view.first_heads(keep)
        protected = base.checked_protected(layers, keep, piece_tokens)
        return SelectionContext(base, view, layers, heads, score, protected, keep, piece_tokens)

    def retained_slots(self, context: "SelectionContext") -> Bool[Tensor, "lane slot"]:
        """Mark the important slots and the representatives of the rest."""
        units = context.units
        sums = units.sums(context.mean_score)
        count = self.num_representatives(units, sums)
        retained = units.best(sums, units.num_retained - count)
        if count.any():
            retained |= self.represent(context, units.free & ~retained, count)
        kept = units.spread(retained, context.view.heads_per_layer)
        return kept.to(context.score.device)

    @property
    def _base(self) -> ScorePolicy:
        assert isinstance(self.base, ScorePolicy), "checked in __post_init__"
        return self.base


@dataclass(frozen=True)
class SelectionContext:
    """Scores and protected slots of some layers, from which representatives are selected.

    Attributes:
        base: the rule.
        view: the sequence.
        layers: the same sequence with one lane per layer.
        heads: the same sequence with one lane per query head.
        score: the base rule's score for every query head.
        protected: slots that are always retained, the same for all heads of a layer.
        keep: number of slots to retain in each layer.
        piece_tokens: neighbouring slots that are evicted together.
        known: stored signature bits, and a mask of the slots that have them; None if none are
            stored.
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
        """The units that are evicted whole."""
        live, protected, keep = map(on_host, (self.layers.live, self.protected, self.keep))
        return Units.of(live, protected & live, keep, self.piece_tokens)

    @property
    def may_leave(self) -> Bool[Tensor, "layer slot"]:
        """Slots that are not protected, in layers that evict."""
        loses = self.keep < self.layers.num_slots[:, 0]
        return self.layers.live & ~self.protected & loses[:, None]

    @cached_property
    def mean_score(self) -> Floats:
        """[layer, column] mean of the scores over the query heads of a layer."""
        return self._mean(self.score)

    @property
    def mean_accumulated(self) -> Floats:
        """[layer, column] mean score before division by the number of queries seen."""
        flat = self.base.accumulated(self.heads, self.score.flatten(0, 1))
        return self._mean(self.heads.by_layer(flat))

    def _mean(self, numbers: Float[Tensor, "layer head slot"]) -> Floats:
        mean: Floats = on_host(numbers[:, :, self.units.columns].mean(dim=1))
        return mean

    @cached_property
    def bits(self) -> Bool[Tensor, "layer head column"]:
        """Whether each query head alone, with the whole budget, retains each evictable token."""
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
        """Signature bits of all slots; the bits of protected slots are 1."""
        must = self.protected & self.layers.live
        bits = must[:, None].repeat(1, self.score.shape[1], 1)
        bits[:, :, self.units.columns] |= self.bits
        return bits if self.known is None else torch.where(self.known[1], self.known[0], bits)

    def _best_of_heads(self) -> Bool[Tensor, "layer head column"]:
        """Select the best evictable slots of each head, in addition to the protected ones."""
        units = self.units
        shared = (units.free_slots[:, None], units.wanted_slots[:, None])
        free, wanted = (torch.from_numpy(part).to(self.score.device) for part in shared)
        return best_slots(self.score[:, :, units.columns], free, wanted)

    def _chosen_by_heads(self) -> Bool[Tensor, "layer head slot"]:
        """Select the slots of each head with a base rule that overrides `choose`."""
        heads = self.score.shape[1]
        protected = self.protected.repeat_interleave(heads, dim=0)
        keep = self.keep.repeat_interleave(heads)
        chosen = self.base.choose(self.heads, self.score.flatten(0, 1), protected, keep)
        return self.heads.by_layer(chosen)

    def signatures(self, grouped: Marks) -> Signatures:
        """Return the bits of a layer's query heads for each unit."""
        return Signatures(self.units.side_by_side(on_host(self.bits)), grouped, self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers in the model; counted from 0 if the view names no layers."""
        return self.view.layers or tuple(range(len(self.score)))


def on_host(numbers: Tensor) -> NDArray[Any]:
    """Convert a tensor to a NumPy array; on CPUs the array shares its memory."""
    array: NDArray[Any] = numbers.cpu().numpy()
    return array


def _mean_over_layer(
    score: Float[Tensor, "head slot"], heads: KVView
) -> Float[Tensor, "layer slot"]:
    return heads.by_layer(torch.where(heads.live, score, 0.0)).mean(dim=1)
