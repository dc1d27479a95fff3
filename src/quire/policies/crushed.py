"""Important tokens, and representatives of the rest: the base class of KVCrush's variants.

    budget left after protection    B = B_imp + B_rep
    important                       the B_imp best by the mean over query heads
    grouped                         the rest, of which B_rep tokens are retained as representatives

A signature spans the query heads of a layer. With `sets=layer`, each layer has one retained set;
important tokens are ranked by the mean over all query heads of the layer. With `sets=head`, each KV
head has its own: its important tokens are ranked by the mean over its own query heads, and its
representatives are selected from its own tokens with its own anchor.

Representatives may get a share of the budget:

    B_rep = floor(share * B)      B: the budget left after protection

With `representatives=additive` the representatives are added to the cap. Let K be the tokens of the
written cap that an eviction leaves, and F the number of tokens that the base rule protects at any
cap. A lane then holds share * (K - F) more tokens, and representatives get share / (1 + share) of
the budget left after protection, which is the same number. Tokens that are protected in proportion
to the cap (h2o's newest half) get their share of the added tokens. Compare such a rule with its
base rule at the larger cap.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError, UnknownName
from quire.layout.statistics import Statistic
from quire.policies.base import (
    LANE,
    LAYER,
    Division,
    EvictionPolicy,
    ScorePolicy,
)
from quire.policies.choose import Floats, in_whole_pieces
from quire.policies.h2o import H2O
from quire.policies.signatures.context import SelectionContext
from quire.policies.signatures.query_heads import apart, by_query_head, first_heads
from quire.policies.signatures.units import Marks, Units
from quire.policies.view import KVView

OF_LAYER, OF_HEAD = "layer", "head"
SETS = (OF_LAYER, OF_HEAD)

_SEARCH_LIMIT = 1 << 20
"""Limit of the search for the least cap; no useful cap is larger."""
INSIDE, ADDITIVE = "inside", "additive"
PLACES = (INSIDE, ADDITIVE)


@dataclass(frozen=True, slots=True)
class Crushed(ScorePolicy):
    """Retains the tokens with a base rule's highest scores, and representatives of the rest.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: seed of random choices.
        sets: layer (one retained set for all heads of a layer) or head (one for each KV head).
    """

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    seed: int = 0
    sets: str = OF_LAYER

    def __post_init__(self) -> None:
        if self.sets not in SETS:
            raise UnknownName("scope of retained sets (sets)", self.sets, SETS)
        if not isinstance(self.base, ScorePolicy) or not self.base.scores_heads:
            raise ConfigError(
                f"{type(self).__name__} needs a base whose scores differ between query heads, got "
                f"{type(self.base).__name__}; use a base such as h2o, snapkv or expected_attention"
            )

    @property
    def scope(self) -> str:
        return LAYER if self.sets == OF_LAYER else LANE

    @property
    def scores_heads(self) -> bool:
        return False  # signatures need the scores of query heads: not a base of such a rule

    @property
    def rerotates_keys(self) -> bool:
        return self.base.rerotates_keys

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return apart(self.base.statistics)

    @property
    def min_cap(self) -> int:
        return self.min_retained()

    @abstractmethod
    def min_free(self, piece_tokens: int) -> int:
        """Return the fewest unprotected tokens for which at least one is a representative."""

    @abstractmethod
    def num_representatives(self, units: Units) -> NDArray[np.int64]:
        """Return how many of the retained free units of each row are representatives, [row]."""

    @abstractmethod
    def represent(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks:
        """Select `count` of the grouped units of each row, or all if there are fewer.

        Args:
            context: scores and bits of the base rule.
            grouped: [row, unit] units that are not important.
            count: [row] number of units to select.
        """

    def min_retained(self, piece_tokens: int = 1) -> int:
        edges = 2 * piece_tokens if piece_tokens > 1 else 0
        free = self.min_free(piece_tokens)
        keep = self.base.min_cap - 1 + free
        while keep < _SEARCH_LIMIT:  # the number of protected slots may grow with `keep`
            slots = torch.arange(2 * keep)[None]
            held = int(self._base.protected(KVView(slots, 2 * keep), torch.tensor([keep])).sum())
            if held + free <= keep:
                break
            keep = held + free
        return keep + edges

    # ---- selection -----------------------------------------------------------------------------

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Return the mean of the base rule's scores over the query heads of a retained set."""
        heads = by_query_head(view, self._base.statistics)
        score = torch.where(heads.live, self._base.checked_score(heads), 0.0)
        repeats = view.heads_per_layer if self.scope == LAYER else 1
        mean = self._by_row(score, view).mean(dim=1)
        return mean.repeat_interleave(repeats, dim=0)

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        return self._base.protected(view, keep)

    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        return self.retained_of(self.selection_context(view, keep, piece_tokens))

    def select_divided(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int, divide: Division
    ) -> Bool[Tensor, "lane slot"]:
        context = self.selection_context(view, keep, piece_tokens)
        must = in_whole_pieces(context.protected, view.live, piece_tokens)
        keep = divide(context.score.mean(dim=1), must)
        return self.retained_of(replace(context, protected=must, keep=keep))

    def selection_context(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int
    ) -> SelectionContext:
        """Run the base rule, and return its scores and protected slots."""
        base, heads = self._base, by_query_head(view, self._base.statistics)
        score = self._by_row(base.checked_score(heads), view)
        rows = view
        if self.scope == LAYER:
            rows, keep = first_heads(view), view.first_heads(keep)
        protected = base.checked_protected(rows, keep, piece_tokens)
        return SelectionContext(base, view, rows, heads, score, protected, keep, piece_tokens)

    def retained_of(self, context: SelectionContext) -> Bool[Tensor, "lane slot"]:
        """Retain the important slots and the representatives of the rest."""
        units, sums = context.units, context.sums
        count = self.num_representatives(units)
        important = units.best(sums, units.num_retained - count)
        grouped = units.free & ~important
        chosen = np.zeros_like(grouped)
        if count.any():
            chosen = self.represent(context, grouped, count)
        return units.spread(important | chosen, context.heads_per_row).to(context.score.device)

    def _by_row(
        self, numbers: Shaped[Tensor, "query_head slot"], view: KVView
    ) -> Shaped[Tensor, "row head slot"]:
        """Group the query heads of each retained set."""
        heads = view.group * (view.heads_per_layer if self.scope == LAYER else 1)
        return numbers.view(-1, heads, numbers.shape[1])

    @property
    def _base(self) -> ScorePolicy:
        assert isinstance(self.base, ScorePolicy), "checked in __post_init__"
        return self.base


@dataclass(frozen=True, slots=True)
class CrushedShare(Crushed, ABC):
    """Retains the tokens with a base rule's highest scores, and a share of representatives.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: seed of random choices.
        sets: layer (one retained set for all heads of a layer) or head (one for each KV head).
        share: fraction of the budget left after protection that representatives get; 0: none.
        representatives: inside (part of the cap) or additive (in addition to the cap).
    """

    share: float = 0.25
    representatives: str = INSIDE

    def __post_init__(self) -> None:
        Crushed.__post_init__(self)
        if not 0 <= self.share < 1:
            raise ConfigError(
                "expected 0 <= share < 1, the fraction of the budget that representatives get, "
                f"got {self.share}"
            )
        if self.representatives not in PLACES:
            raise UnknownName("place of representatives", self.representatives, PLACES)

    @property
    def share_of_all(self) -> float:
        """The representatives' fraction of the unprotected budget, including added tokens."""
        return self.share if self.representatives == INSIDE else self.share / (1 + self.share)

    @property
    def cap_hint(self) -> str:
        if not self.share:
            return self.base.cap_hint
        return "raise cap or share (0: no representatives), or lower every"

    def min_free(self, piece_tokens: int) -> int:
        return piece_tokens * (ceil(round(1 / self.share_of_all, 9)) if self.share else 1)

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        if self.representatives == INSIDE:
            return 0
        left = max(0, kept - (self.base.min_cap - 1))
        return int(round(self.share * left, 9)) // piece_tokens * piece_tokens

    def num_representatives(self, units: Units) -> NDArray[np.int64]:
        share: Floats = (units.num_retained * self.share_of_all).round(9)  # 0.3 * 10 gives 3
        return np.floor(share).astype(np.int64)
