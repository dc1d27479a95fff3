"""Interface of an eviction policy: a frozen dataclass that selects the slots of a lane to retain.

A policy has no state. Statistics that must persist between steps are declared (`statistics`) and
stored in the sequence's own pages. A policy sees the lanes of one or several sequences, and the
retained set of a sequence depends on its own lanes only. It receives a number of slots to retain,
never a ratio. Slots that must be retained (sinks, newest tokens) are a mask, never
a score. Ties retain the lower position.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite
from typing import ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import Statistic
from quire.policies.choose import choose_pieces, choose_slots, in_whole_pieces
from quire.policies.options import check_at_least
from quire.policies.view import KVView

LANE, LAYER = "lane", "layer"
Division = Callable[[Tensor, Tensor], Tensor]
"""Slots to retain in each lane, from scores [lane, slot] and protected slots [lane, slot]."""
Keep = TypeVar("Keep", Tensor, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class StoredScore:
    """A score that needs no arithmetic of the rule: kernels read it from the pages.

    Attributes:
        statistic: the score is this number of each slot; None: its position.
        per_query: divide it by the number of queries that have seen the slot.
    """

    statistic: Statistic | None = None
    per_query: bool = False

    def read(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Return the score of each slot of a view."""
        if self.statistic is None:
            return view.positions.double()  # exact for every position
        numbers = view.statistic(self.statistic)
        return numbers / view.queries_seen if self.per_query else numbers


class EvictionPolicy(ABC):
    """Selects the slots to retain. Subclasses are frozen dataclasses; their fields are options."""

    cost: ClassVar[str] = ""
    """Cost in addition to reading the cache, in a few words, shown by `quire policies`."""
    reads_vectors: ClassVar[bool] = True
    """Whether the rule reads keys or values; if not, no memory is reserved for copies of them."""
    scores_in_pages: ClassVar[str] = ""
    """Plane that the rule reads by `KVView.in_pages` only, if that gives scores; "" for none."""
    reads_projection: ClassVar[bool] = False
    """Whether the rule reads `KVView.projected_lengths`; models that cannot give them refuse it."""
    has_negative_scores: ClassVar[bool] = False
    """Whether scores may be below 0, which rules that multiply or add scores refuse in a base."""
    not_on_latents: ClassVar[str] = ""
    """Why the scores have no meaning for latents (MLA), and what to use; "" for rules that have."""
    extra: ClassVar[str] = ""
    """Optional packages that the policy needs: a key of `quire.layout.extras.EXTRAS`, or ""."""

    @property
    def scope(self) -> str:
        """Scope of a retained set: one set per KV head (LANE) or one per layer (LAYER)."""
        return LANE

    @property
    def lanes_apart(self) -> bool:
        """Whether the retained set of a lane depends only on this lane, not on its number either.

        The ranks of a tensor-parallel model then decide without the lanes of other ranks.
        """
        return False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """Statistics that the policy needs; see `quire.layout.statistics`."""
        return ()

    @property
    def rerotates_keys(self) -> bool:
        """Whether retained tokens get new, contiguous positions; keys are then stored before RoPE.

        All rules of an engine must agree.
        """
        return False

    @property
    def min_cap(self) -> int:
        """Minimum number of tokens that a lane must hold after an eviction."""
        return 1

    @property
    def cap_hint(self) -> str:
        """What to change if a cap leaves fewer tokens than `min_cap`; for error messages."""
        return "raise cap or lower every"

    @property
    def retains_fewer(self) -> bool:
        """Whether lanes that evict may retain fewer slots than `keep`."""
        return False

    @property
    def needs_pieces(self) -> bool:
        """Whether the policy evicts whole pages or chunks only, never single tokens."""
        return False

    def min_retained(self, piece_tokens: int = 1) -> int:
        """Return `min_cap` for pieces of `piece_tokens` neighbouring tokens."""
        # a piece that holds a protected slot is retained whole, at both ends
        return max(1, self.min_cap) + (2 * piece_tokens if piece_tokens > 1 else 0)

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        """Return the tokens that a lane may hold beyond its configured cap; 0 for most rules.

        Args:
            kept: tokens that an eviction would leave under that cap.
            piece_tokens: neighbouring tokens that are evicted together.
        """
        del kept, piece_tokens
        return 0

    @abstractmethod
    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        """Select the slots to retain.

        Args:
            view: lanes of one or several sequences.
            keep: slots to retain in each lane; at most the number the lane holds.
            piece_tokens: neighbouring slots that are evicted together.

        Returns:
            True for each retained slot: exactly `keep` per lane, or at most `keep` with pieces or
            `retains_fewer`.
        """


class ScorePolicy(EvictionPolicy):
    """Retains the protected slots and, of the rest, those with the highest scores."""

    @property
    def scores_heads(self) -> bool:
        """Whether scores can differ between heads: the rule reads queries, keys or values."""
        return True

    @abstractmethod
    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Return the score of each slot, finite if the slot is live; higher scores are retained."""

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        """Return the score before division by the number of queries that have seen each slot.

        Args:
            view: the view that was scored.
            score: result of `score` for that view.
        """
        del view
        return score

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        """Return which ends of a lane are retained regardless of score.

        Args:
            keep: [lane] slots to retain, as a tensor or an array.

        Returns:
            Slots at positions below the first number, and as many newest slots as the second one.
        """
        del keep
        return 0, 0

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        """Return the slots that are retained regardless of score if `keep` slots are retained."""
        sinks, newest = self.protected_ends(keep)
        newest = newest[:, None] if isinstance(newest, Tensor) else newest
        return view.oldest_positions(sinks) | view.newest(newest)

    @property
    def protects_ends(self) -> bool:
        """Whether the protected slots are those of `protected_ends`."""
        return type(self).protected is ScorePolicy.protected

    @property
    def only_ranks(self) -> bool:
        """Whether the rule does no more than rank its scores; kernels then select the slots."""
        own = type(self)
        return own.select is ScorePolicy.select and own.choose is ScorePolicy.choose

    @property
    def read_by_kernels(self) -> StoredScore | None:
        """The score of the rule if kernels can read it; None if `score` computes it."""
        return None

    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        protected = self.checked_protected(view, keep, piece_tokens)
        return self.choose(view, self.checked_score(view), protected, keep, piece_tokens)

    def select_divided(
        self,
        view: KVView,
        keep: Int[Tensor, " lane"],
        piece_tokens: int,
        divide: Division,
    ) -> Bool[Tensor, "lane slot"]:
        """Select the slots to retain, of which a budget moves some between the heads of a layer.

        Args:
            view: lanes of one sequence.
            keep: slots to retain in each lane before slots move; sets the protected slots.
            piece_tokens: neighbouring slots that are evicted together.
            divide: returns the slots to retain from scores and protected slots.
        """
        score = self.checked_score(view)
        protected = self.checked_protected(view, keep, piece_tokens)
        must = in_whole_pieces(protected, view.live, piece_tokens)
        return self.choose(view, score, must, divide(score, must), piece_tokens)

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        """Convert scores to a retained set according to `scope`; wrapping rules call this."""
        if self.scope == LAYER:
            by_layer = view.by_layer(score)
            score = by_layer.mean(dim=1, keepdim=True).expand_as(by_layer).flatten(0, 1)
        if piece_tokens > 1:
            return choose_pieces(score, view.live, protected, keep, piece_tokens)
        return choose_slots(score, view.live, protected, keep)

    def checked_score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Return the score after checking it.

        Raises:
            PolicyError: the shape is wrong, or a score is not finite.
        """
        score = self._shaped("score", self.score(view), view)
        at_once = view.breaches is None
        if at_once and _all_finite(score):
            return score
        if view.breaks_contract(~torch.isfinite(score) & view.live):
            raise PolicyError(f"{type(self).__name__} returned a score that is not finite")
        return score

    def checked_protected(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        """Return the protected slots after checking that they fit, as whole pieces too.

        Raises:
            PolicyError: the shape is wrong, or more slots are protected than may be retained.
        """
        if piece_tokens > 1:
            # in lanes that lose slots, each end of the protected range may widen to a whole piece
            edges = 2 * (piece_tokens - 1)
            keep = torch.where(keep < view.num_slots[:, 0], keep - edges, keep)
        protected = self.shaped_protected(view, keep)
        over = protected.sum(dim=1) - keep
        if view.breaks_contract(over > 0):
            lane = int(over.argmax())
            raise PolicyError(
                f"{type(self).__name__} protects {int(protected[lane].sum())} slots of a lane, but "
                f"only {int(keep[lane])} may be retained; increase its min_cap"
            )
        return protected

    def mean_score(self, view: KVView) -> Float[Tensor, "row slot"]:
        """Return the score, of each layer if its heads share a retained set; finite or not.

        Contiguous float32, or float64.
        """
        score = self._shaped("score", self.score(view), view)
        if self.scope == LAYER and view.heads_per_layer > 1:
            score = view.by_layer(score).mean(dim=1)
        exact = score.dtype in (torch.float32, torch.float64)
        return score.contiguous() if exact else score.double().contiguous()

    def shaped_protected(
        self, view: KVView, keep: Int[Tensor, " lane"]
    ) -> Bool[Tensor, "lane slot"]:
        """Return the protected slots after checking the shape only."""
        return self._shaped("protected", self.protected(view, keep), view)

    def _shaped(self, method: str, given: object, view: KVView) -> Tensor:
        if isinstance(given, Tensor) and given.shape == view.shape:
            return given
        got = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise PolicyError(
            f"{type(self).__name__}.{method} must return a tensor of shape [lanes, slots] = "
            f"{list(view.shape)}, got {got}"
        )


@dataclass(frozen=True, slots=True)
class SinksAndRecent(ScorePolicy):
    """A score rule that protects the first tokens of a sequence and the newest cached ones.

    Attributes:
        sinks: tokens at logical positions below this are never evicted.
        recent: number of newest cached tokens that are never evicted.
    """

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks, recent=self.recent)

    @property
    def min_cap(self) -> int:
        return self.sinks + self.recent + 1

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        del keep
        return self.sinks, self.recent


_H2O = "; use a base whose scores are attention weights, such as h2o"


class WrappingPolicy(ScorePolicy):
    """A score rule around another one, its option `base`, whose protected slots are retained.

    Subclasses are dataclasses with the option; they override `score` or `choose`.
    """

    name: ClassVar[str]
    """Registered name, for errors."""
    base: EvictionPolicy

    def __post_init__(self) -> None:
        base = type(self.base).__name__
        if not isinstance(self.base, ScorePolicy):
            raise ConfigError(
                f"{self.name} reads the scores of its base, and {base} returns none; use a base "
                "that scores tokens, such as h2o"
            )
        if self.base.has_negative_scores:
            raise ConfigError(f"{self.name} needs scores >= 0, and {base} has negative ones{_H2O}")
        if type(self.base).select is not ScorePolicy.select:
            raise ConfigError(
                f"{self.name} ranks scores, and {base} does more than rank its own; nest "
                f"{self.name} inside, such as kvcrush:base=({self.name}:base=h2o)"
            )

    @property
    def scope(self) -> str:
        return self.base.scope

    @property
    def lanes_apart(self) -> bool:
        return self.base.lanes_apart

    @property
    def retains_fewer(self) -> bool:
        return self.base.retains_fewer

    @property
    def scores_heads(self) -> bool:
        return self.rule.scores_heads

    @property
    def rerotates_keys(self) -> bool:
        return self.base.rerotates_keys

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return self.base.statistics

    @property
    def min_cap(self) -> int:
        return self.base.min_cap

    @property
    def protects_ends(self) -> bool:
        return self.rule.protects_ends

    @property
    def only_ranks(self) -> bool:
        own = type(self)
        changes = own.choose is not WrappingPolicy.choose or own.select is not ScorePolicy.select
        return not changes and self.rule.only_ranks

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return self.rule.checked_score(view)

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        return self.rule.protected_ends(keep)

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        return self.rule.protected(view, keep)

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        return self.rule.choose(view, score, protected, keep, piece_tokens)

    @property
    def rule(self) -> ScorePolicy:
        """The base."""
        assert isinstance(self.base, ScorePolicy), "checked in __post_init__"
        return self.base

    def require_weights(self, view: KVView, score: Float[Tensor, "lane slot"]) -> None:
        """Refuse negative scores.

        Raises:
            PolicyError: names the base.
        """
        if view.breaks_contract((score < 0) & view.live):
            raise PolicyError(
                f"{self.name} needs scores >= 0, and {type(self.base).__name__} returned negative "
                f"ones{_H2O}"
            )


class StoredScorePolicy(ScorePolicy):
    """A score rule whose score is stored with the slots: a declaration instead of arithmetic."""

    @property
    @abstractmethod
    def stored_score(self) -> StoredScore:
        """The score of a slot."""

    @property
    def read_by_kernels(self) -> StoredScore | None:
        # a rule that derives from such a rule may compute another score
        return self.stored_score if type(self).score is StoredScorePolicy.score else None

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return self.stored_score.read(view)

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        stored = self.stored_score
        return replace(stored, per_query=False).read(view) if stored.per_query else score


def _all_finite(numbers: Tensor) -> bool:
    """Whether all numbers are finite; several times faster than a test of each."""
    if not numbers.numel():
        return True
    least, most = torch.aminmax(numbers)  # NaN if any number is NaN
    return isfinite(float(least)) and isfinite(float(most))
