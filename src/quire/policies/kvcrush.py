"""KVCrush (Jha et al. 2025): tokens that heads treat similarly represent each other.

1. Signature: one bit per query head, set if that head alone would retain the token under the base
rule, with its protection and the whole budget (section III-A).
2. Anchor: the Hamming distance of each token's signature to one anchor. That is S distances for S
tokens; clustering needs S * B in every round (section III-B).
3. Buckets: tokens sorted by distance are divided into B_rep buckets, and one token of each bucket
is retained.

Pieces (`granularity=chunk` or `page`): the signature of a piece is the concatenation of its tokens'
bits, its score the sum of their scores (section IV-E).

Worked: 8 tokens, 4 heads, budget 4, of which 2 for representatives; anchor `zeros`.

    token           0     1     2     3     4     5     6     7
    signature    1111  1110  0001  0000  1100  0011  1000  0111
    important      x     x                                            best by the mean
    distance                   1     0     2     2     1     3        to 0000
    sorted                      3 2 6 | 4 5 7                         two slices
    retained       x     x     x                 x                    the middle of each

Differs from the paper: one anchor gives at most heads + 1 distinct distances, fewer than there are
buckets, and the paper does not specify this case. Here tokens are sorted by (distance, position)
and cut into equal slices. The paper takes a random token of a bucket (`pick=random`); the default
takes the middle of the slice, which needs no seed. Only tokens that are not important, and would be
evicted, are grouped. The paper does not specify signatures at later evictions: they are recomputed,
or (`signatures=stored`) stored when a token first becomes evictable. A rule that overrides `choose`
(RoCo) sets bits by its own selection; important tokens are ranked by its scores. `anchors` above 1
assigns each token to the nearest of several anchors, and divides representatives in proportion.
`dynamic` scales the share per retained set. The paper leaves both for future work. The paper does
not have `pick=best`, which takes the token of a bucket with the highest score.

`dynamic`: let p be the set's scores minus the smallest score, normalized to sum 1 over the n
evictable tokens; m the sum of p over the R best; and R / n that sum if all scores were equal:

    representatives of the set = floor(B_rep * (1 - m) / (1 - R / n))
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import UnknownName
from quire.kernels.native.selection import native_selection
from quire.layout.statistics import SignatureBits, SignedUntil, Statistic
from quire.policies.base import Decision
from quire.policies.choose import Floats, count_of
from quire.policies.crushed import CrushedShare, whole
from quire.policies.registry import register
from quire.policies.signatures.anchors import (
    MEAN,
    Signatures,
    Words,
    check_anchor,
    fixed_anchor,
    nearest_anchor,
)
from quire.policies.signatures.context import SelectionContext
from quire.policies.signatures.query_heads import apart
from quire.policies.signatures.representatives import (
    BEST,
    MIDDLE,
    RANDOM,
    check_pick,
    choose_best,
    choose_representatives,
    of_each_anchor,
)
from quire.policies.signatures.units import Marks, Units, spread
from quire.policies.view import KVView

RECOMPUTED, STORED = "recomputed", "stored"
SIGNATURES = (RECOMPUTED, STORED)


@register("kvcrush")
@dataclass(frozen=True, slots=True)
class KVCrush(CrushedShare):
    """Retain the tokens with the base rule's highest scores, and representatives of the rest.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: seed of random choices.
        sets: layer (one retained set for all heads of a layer) or head (one for each KV head).
        share: fraction of the budget left after protection that representatives get; 0: none.
        representatives: inside (part of the cap) or additive (in addition to the cap).
        anchor: random, alternating, mean, zeros, ones; with several anchors random, mean or
            farthest.
        anchors: number of anchors.
        pick: token of a slice to retain, middle, random or best (the highest score).
        dynamic: scale the share per retained set, lower if few tokens have most of the score.
        signatures: recomputed at each eviction, or stored when a token first becomes evictable.
    """

    cost = "the base rule for each query head; one distance for each token and anchor"

    anchor: str = MEAN
    anchors: int = 1
    pick: str = MIDDLE
    dynamic: bool = False
    signatures: str = RECOMPUTED

    def __post_init__(self) -> None:
        CrushedShare.__post_init__(self)
        check_anchor(self.anchor, self.anchors)
        check_pick(self.pick)
        if self.signatures not in SIGNATURES:
            raise UnknownName("kind of signatures", self.signatures, SIGNATURES)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        own = (BITS, UNTIL) if self.writes_statistics else ()
        return (*apart(self.base.statistics), *own)

    @property
    def writes_statistics(self) -> bool:
        return self.signatures == STORED

    def selection_context(
        self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int
    ) -> SelectionContext:
        context = CrushedShare.selection_context(self, view, keep, piece_tokens)
        if not self.writes_statistics:
            return context
        bits, signed = stored_bits(view)
        return replace(context, known=(self._by_row(bits, view), self._by_row(signed, view)))

    def decision_of(self, context: SelectionContext) -> Decision:
        decision = self.decision_in_c(context) or CrushedShare.decision_of(self, context)
        if not self.writes_statistics:
            return decision
        return replace(decision, statistics=statistics_to_store(context))

    def decision_in_c(self, context: SelectionContext) -> Decision | None:
        """Make the same decision in one call of the C library; None if it cannot."""
        native = native_selection()
        plain = self.anchors == 1 and self.pick != RANDOM
        if native is None or not plain or context.piece_tokens > 1:
            return None
        if not self.share or context.score.dtype != torch.float32:
            return None
        signatures = context.signatures()
        units, score = context.units, context.sums
        count = self.num_representatives(units, score)
        kept = native.retained(
            units.live,
            units.free,
            units.columns.start,
            units.num_retained,
            count,
            signatures.words,
            score,
            anchor=self._anchor_of(signatures),
            pick_best=self.pick == BEST,
        )
        return Decision(spread(kept, context.heads_per_row).to(context.score.device))

    def _anchor_of(self, signatures: Signatures) -> Words | None:
        """The anchor of the C library; None for the majority."""
        return None if self.anchor == MEAN else fixed_anchor(signatures, self.anchor, self.seed)

    def represent(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks:
        native = self._represent_natively(context, grouped, count)
        if native is not None:
            return native
        chosen = np.zeros_like(grouped)
        seeds = (self.seed, context.numbers) if self.pick == RANDOM else None
        for distance, near, counts in self._near_anchors(context, grouped, count):
            if self.pick == BEST:
                chosen |= choose_best(distance, near, counts, context.sums)
            else:
                chosen |= choose_representatives(distance, near, counts, seeds)
        return chosen

    def _represent_natively(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks | None:
        """Select the same units with the C library; None if it cannot."""
        native = native_selection()
        if native is None or self.anchors > 1 or self.pick == RANDOM:
            return None
        score = context.sums if self.pick == BEST else None
        if score is not None and score.dtype != np.float32:
            return None
        signatures = context.signatures(grouped)
        anchor = self._anchor_of(signatures)
        return native.representatives(signatures.words, grouped, count, anchor, score)

    def _near_anchors(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], Marks, NDArray[np.int64]]]:
        """Yield, for each anchor, distances, the units nearest to it and their representatives."""
        signatures = context.signatures(grouped)
        distance, which = nearest_anchor(signatures, self.anchor, self.anchors, self.seed)
        counts = of_each_anchor(which, grouped, count, self.anchors)
        for number in range(self.anchors):
            near = grouped & (which == number) if self.anchors > 1 else grouped
            yield distance, near, counts[:, number]

    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        count = CrushedShare.num_representatives(self, units, sums)
        return whole(count * _spread(units, sums)) if self.dynamic else count


def _spread(units: Units, sums: Floats) -> NDArray[np.float64]:
    """[layer] how evenly scores are spread over evictable tokens: 0 concentrated, 1 uniform."""
    free = units.free
    least = np.where(free, sums, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    above = np.where(free, sums - least, 0.0).astype(np.float64)
    mass = above.sum(axis=1)
    best = (above * units.best(sums, units.num_retained)).sum(axis=1)
    outside = 1 - units.num_retained / np.maximum(count_of(free), 1)
    missed = np.where(mass > 0, 1 - best / np.maximum(mass, 1e-300), outside)
    return np.clip(missed / np.maximum(outside, 1e-12), 0, 1)


# Stored signatures: written at one eviction, read at the next.
#
# Signatures are not stored for tokens that are still protected, such as the newest, nor in layers
# that do not evict yet: every head would retain these tokens, so their bits carry no information.

BITS, UNTIL = SignatureBits(), SignedUntil()


def stored_bits(view: KVView) -> tuple[Bool[Tensor, "head slot"], Bool[Tensor, "head slot"]]:
    """Return the stored bits of each query head, and a mask of the slots that have them.

    Raises:
        PolicyError: the view was built without them.
    """
    until = view.statistic(UNTIL)[:, 0]
    signed = (view.live & (view.positions < until)).repeat_interleave(view.group, dim=0)
    numbers = torch.where(view.live, view.statistic(BITS), 0.0).nan_to_num(0, 0, 0).long()
    heads = torch.arange(view.group, device=numbers.device)
    bits = (numbers[:, None] >> heads[:, None]) & 1
    return bits.bool().flatten(0, 1), signed


def statistics_to_store(context: SelectionContext) -> Mapping[Statistic, Float[Tensor, "..."]]:
    """Return the statistics to store: bits of each query head for all evictable slots.

    Args:
        context: context with the bits stored before.
    """
    view, bits = context.view, context.all_bits
    heads = torch.arange(view.group, device=bits.device)
    numbers = (bits.view(-1, view.group, bits.shape[2]).long() << heads[:, None]).sum(dim=1)
    behind = torch.where(context.may_leave, context.rows.positions + 1, 0).amax(dim=1)
    behind = behind.repeat_interleave(context.heads_per_row)[:, None, None]
    return {BITS: numbers.float(), UNTIL: torch.maximum(view.statistic(UNTIL), behind.float())}
