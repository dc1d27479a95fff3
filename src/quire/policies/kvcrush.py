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
evicted, are grouped. The paper does not specify signatures at later evictions: they are recomputed.
A rule that overrides `choose` (RoCo) sets bits by its own selection; important tokens are ranked by
its scores. The paper does not have `pick=best`, which takes the token of a bucket with the highest
score.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels import device_copies
from quire.kernels.native.selection import native_selection
from quire.policies.choose import best_slots
from quire.policies.crushed import CrushedShare
from quire.policies.registry import register
from quire.policies.signatures.anchors import (
    MEAN,
    Signatures,
    Words,
    anchor_distance,
    check_anchor,
    fixed_anchor,
)
from quire.policies.signatures.context import SelectionContext
from quire.policies.signatures.representatives import (
    BEST,
    MIDDLE,
    RANDOM,
    check_pick,
    choose_best,
    choose_representatives,
)
from quire.policies.signatures.units import Marks, spread


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
        anchor: random, alternating, mean, zeros or ones.
        pick: token of a slice to retain, middle, random or best (the highest score).
    """

    cost = "the base rule for each query head; one distance for each token"

    anchor: str = MEAN
    pick: str = MIDDLE

    def __post_init__(self) -> None:
        CrushedShare.__post_init__(self)
        check_anchor(self.anchor)
        check_pick(self.pick)

    def retained_of(self, context: SelectionContext) -> Bool[Tensor, "lane slot"]:
        on_host = device_copies.reads_freely(context.score.device)
        fast = self.retained_in_c(context) if on_host else self.retained_in_torch(context)
        return CrushedShare.retained_of(self, context) if fast is None else fast

    def retained_in_torch(self, context: SelectionContext) -> Bool[Tensor, "lane slot"] | None:
        """Select the same slots on a device, without reading from it; None if it cannot."""
        rows, keep, score = context.rows, context.keep, context.score
        if self.anchor != MEAN or self.pick != MIDDLE or not self.share:
            return None
        if context.piece_tokens > 1 or context.rows_per_layer > 1:
            return None
        slots, device = score.shape[2], score.device
        must = context.protected & rows.live
        free = rows.live & ~must
        open_slots = free.sum(dim=1)
        retained = (keep - must.sum(dim=1)).clamp_min(0).minimum(open_slots)
        count = (retained.double() * self.share_of_all).round(decimals=9).long()
        important = best_slots(score.mean(dim=1), free, retained - count)
        grouped = free & ~important
        bits = context.marks_of_heads(free, retained) & grouped[:, None]
        total = grouped.sum(dim=1, keepdim=True)
        majority = 2 * bits.sum(dim=2) > total
        distance = (bits != majority[:, :, None]).sum(dim=1)
        # sorted by (distance, position), the rest behind; then one slot of each slice
        slot = torch.arange(slots, device=device)
        keys = torch.where(grouped, distance, context.width + 1) * slots + slot
        order = keys.sort(dim=1).values % slots
        slices = count[:, None].minimum(total)
        cuts = torch.arange(slots + 1, device=device) * total // slices.clamp_min(1)
        first, length = cuts[:, :-1], cuts.diff(dim=1)
        middle = (first + (length - 1) // 2).clamp(0, slots - 1)
        places = torch.where(slot < slices, order.gather(1, middle), slots)
        chosen = torch.zeros(len(free), slots + 1, dtype=torch.bool, device=device)
        chosen.scatter_(1, places, True)
        kept = must | important | chosen[:, :slots]
        return kept.repeat_interleave(context.heads_per_row, dim=0)

    def retained_in_c(self, context: SelectionContext) -> Bool[Tensor, "lane slot"] | None:
        """Select the same slots in one call of the C library; None if it cannot."""
        native = native_selection()
        if native is None or self.pick == RANDOM or context.piece_tokens > 1:
            return None
        if not self.share or context.score.dtype != torch.float32:
            return None
        signatures = context.signatures()
        units, score = context.units, context.sums
        count = self.num_representatives(units)
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
        return spread(kept, context.heads_per_row).to(context.score.device)

    def _anchor_of(self, signatures: Signatures) -> Words | None:
        """The anchor of the C library; None for the majority."""
        return None if self.anchor == MEAN else fixed_anchor(signatures, self.anchor, self.seed)

    def represent(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks:
        native = self._represent_natively(context, grouped, count)
        if native is not None:
            return native
        distance = anchor_distance(context.signatures(grouped), self.anchor, self.seed)
        if self.pick == BEST:
            return choose_best(distance, grouped, count, context.sums)
        seeds = (self.seed, context.numbers) if self.pick == RANDOM else None
        return choose_representatives(distance, grouped, count, seeds)

    def _represent_natively(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks | None:
        """Select the same units with the C library; None if it cannot."""
        native = native_selection()
        if native is None or self.pick == RANDOM:
            return None
        score = context.sums if self.pick == BEST else None
        if score is not None and score.dtype != np.float32:
            return None
        signatures = context.signatures(grouped)
        anchor = self._anchor_of(signatures)
        return native.representatives(signatures.words, grouped, count, anchor, score)
