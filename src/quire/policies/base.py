"""What an eviction policy is: a frozen dataclass that says which slots of a lane stay.

A policy has no state. What must be remembered between steps is declared (`statistics`) and kept for
it in the sequence's own pages. It sees one sequence at a time, never its companions; it gets a
number of slots to keep, never a ratio; what must stay (sinks, newest tokens) is a mask, never a
score; and ties keep the lower position.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import PolicyError
from quire.layout.statistics import Statistic
from quire.policies.choose import choose_pieces, choose_slots
from quire.policies.options import check_at_least
from quire.policies.view import KVView

LANE, LAYER = "lane", "layer"


@dataclass(frozen=True, slots=True)
class Decision:
    """What stays, and what is to be written down about it.

    Attributes:
        stays: bool [lane, slot], True where a slot stays; who asked a rule checks it.
        notes: what to write over of declared statistics, before any slot moves: per slot
            [lane, slot], else [lane, record, number].
    """

    stays: Any
    notes: Mapping[Statistic, Float[Tensor, "..."]] = field(default_factory=dict)


class EvictionPolicy(ABC):
    """Decides which slots stay. Subclasses are frozen dataclasses; their fields are options."""

    cost: ClassVar[str] = ""
    """What it costs beside reading the cache, in a few words: for `quire policies`."""

    @property
    def scope(self) -> str:
        """What shares one kept set: each KV head has its own (LANE), or all of a layer have one."""
        return LANE

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        """What it has remembered; see `quire.layout.statistics`."""
        return ()

    @property
    def rerotates_keys(self) -> bool:
        """Whether what stays gets new rotary positions, without holes: keys are stored before RoPE.

        All rules of an engine do, or none.
        """
        return False

    @property
    def least_cap(self) -> int:
        """Tokens a lane must be able to hold after an eviction for this policy to make sense."""
        return 1

    @property
    def more_room(self) -> str:
        """What to change where a cap leaves less than that; for errors."""
        return "raise cap or lower every"

    @property
    def needs_pieces(self) -> bool:
        """Whether it knows pages or chunks only, and no single tokens."""
        return False

    def least_retained(self, piece_tokens: int = 1) -> int:
        """The same where neighbouring tokens stay or go together."""
        # pieces that hold a protected slot stay whole, at both ends
        return max(1, self.least_cap) + (2 * piece_tokens if piece_tokens > 1 else 0)

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        """Tokens that a lane may hold beyond the cap that is written; 0 for nearly all rules.

        Args:
            kept: tokens that an eviction would leave under that cap.
            piece_tokens: neighbouring tokens that stay or go together.
        """
        del kept, piece_tokens
        return 0

    @abstractmethod
    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        """Choose the slots that stay.

        Args:
            view: one sequence.
            keep: slots to keep in each lane; no more than it holds.
            piece_tokens: neighbouring slots that stay or go together.

        Returns:
            True where a slot stays: exactly `keep` in each lane, or with pieces at most that many.
        """

    @property
    def takes_notes(self) -> bool:
        """Whether `decide` may have something written down."""
        return False

    def decide(self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1) -> Decision:
        """Choose the slots that stay, as `select`, and say what to remember of them."""
        return Decision(self.select(view, keep, piece_tokens))


class ScorePolicy(EvictionPolicy):
    """Keeps protected slots and, of the rest, those that score highest."""

    @property
    def scores_heads(self) -> bool:
        """Whether its scores can differ from head to head: it looks at queries, keys or values."""
        return True

    @abstractmethod
    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Importance of each slot, finite where live; higher stays."""

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        """The score before it is divided by the number of queries that have seen each slot.

        Args:
            view: that was scored.
            score: what it scored.
        """
        del view
        return score

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        """Slots that stay whatever they score, given how many may; see `least_cap`."""
        del keep
        return torch.zeros_like(view.live)

    def select(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        protected = self.checked_protected(view, keep, piece_tokens)
        return self.choose(view, self.checked_score(view), protected, keep, piece_tokens)

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        """Turn scores into a kept set, as its scope says; for rules around rules."""
        if self.scope == LAYER:
            score = _mean_over_heads(score, view)
        if piece_tokens > 1:
            return choose_pieces(score, view.live, protected, keep, piece_tokens)
        return choose_slots(score, view.live, protected, keep)

    def checked_score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """The score, proved to be one.

        Raises:
            PolicyError: another shape, or a number that is not finite.
        """
        score = self._shaped(self.score(view), view)
        if not bool((torch.isfinite(score) | ~view.live).all()):
            raise PolicyError(f"{type(self).__name__} gave a score that is not finite")
        return score

    def checked_protected(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1
    ) -> Bool[Tensor, "lane slot"]:
        """The protected slots, proved to fit, as whole pieces too.

        Raises:
            PolicyError: another shape, or more than may stay.
        """
        if piece_tokens > 1:
            # each end of what is protected may widen to a whole piece, in lanes that lose any
            edges = 2 * (piece_tokens - 1)
            keep = torch.where(keep < view.num_slots[:, 0], keep - edges, keep)
        protected = self._shaped(self.protected(view, keep), view)
        over = protected.sum(dim=1) - keep
        if bool((over > 0).any()):
            lane = int(over.argmax())
            raise PolicyError(
                f"{type(self).__name__} protects {int(protected[lane].sum())} slots of a lane, but "
                f"{int(keep[lane])} may stay; least_cap must say so"
            )
        return protected

    def _shaped(self, given: Tensor, view: KVView) -> Tensor:
        if given.shape != view.live.shape:
            raise PolicyError(
                f"{type(self).__name__}: expected {list(view.live.shape)}, got {list(given.shape)}"
            )
        return given


@dataclass(frozen=True, slots=True)
class SinksAndRecent(ScorePolicy):
    """A score rule that protects the first tokens of a sequence and the newest cached ones.

    Attributes:
        sinks: tokens at logical positions below this never leave.
        recent: so many of the newest cached tokens do not leave.
    """

    sinks: int = 0
    recent: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks, recent=self.recent)

    @property
    def least_cap(self) -> int:
        return self.sinks + self.recent + 1

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        del keep
        return view.oldest_positions(self.sinks) | view.newest(self.recent)


def _mean_over_heads(score: Float[Tensor, "lane slot"], view: KVView) -> Float[Tensor, "lane slot"]:
    """One score for the heads of a layer, whose slots hold the same tokens."""
    by_layer = view.by_layer(score)
    return by_layer.mean(dim=1, keepdim=True).expand_as(by_layer).flatten(0, 1)
