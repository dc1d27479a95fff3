"""KVCrush (Jha et al. 2025): tokens that heads treat alike stand for each other.

1. One bit for each query head: would this head alone keep the token under the base rule, with its
   protection and the whole budget? The bits are the token's signature (section III-A).
2. One anchor; the Hamming distance of each token's signature to it: S distances for S tokens, where
   clustering needs S * B in every round (section III-B).
3. Tokens sorted by distance go into B_rep buckets; one of each stays.

Pieces (`granularity=chunk` or `page`): the signature of a piece is its tokens' bits one behind the
other, its score their sum (section IV-E).

Worked: 8 tokens, 4 heads, budget 4, of which 2 for representatives; anchor `zeros`.

    token           0     1     2     3     4     5     6     7
    signature    1111  1110  0001  0000  1100  0011  1000  0111
    important      x     x                                            best by the mean
    distance                   1     0     2     2     1     3        to 0000
    sorted                      3 2 6 | 4 5 7                         two slices
    stays          x     x     x                 x                    the middle of each

Differs from the paper: with one anchor there are no more distances than heads + 1, fewer than
buckets, and the paper does not say what happens then. Here tokens are sorted by (distance,
position) and cut into equal slices. The paper takes a random token of a bucket (`pick=random`); by
default the slice's middle is taken, which needs no seed. Grouped are the tokens that are not
important: those that would leave. The paper does not say what becomes of signatures when tokens
leave again: they are made anew, or (`signatures=kept`) written down when a token may leave for the
first time. A rule that does more than rank its scores (RoCo) gives bits by its own choice; what is
important goes by its scores. `anchors` above 1 measures from several, each token from the nearest,
and representatives in proportion; `dynamic` takes a part of the share, by layer: both answer what
the paper leaves for later.

`dynamic`: with p = the layer's scores above the least one, as parts of their sum over the n tokens
that may leave, m = what the R best have of it, and R / n what they would have were all alike:

    representatives of the layer = floor(B_rep * (1 - m) / (1 - R / n))
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import UnknownName
from quire.layout.statistics import SignatureBits, SignedUntil, Statistic
from quire.policies.base import Decision
from quire.policies.best import Floats, count_of
from quire.policies.crushed import Asked
from quire.policies.crushed_share import CrushedShare, whole
from quire.policies.registry import register
from quire.policies.signatures.anchors import MEAN, check_anchor, nearest_anchor
from quire.policies.signatures.query_heads import apart
from quire.policies.signatures.representatives import (
    MIDDLE,
    RANDOM,
    check_pick,
    choose_representatives,
    of_each_anchor,
)
from quire.policies.signatures.units import Marks, Units
from quire.policies.view import KVView

RECOMPUTED, KEPT = "recomputed", "kept"
SIGNATURES = (RECOMPUTED, KEPT)


@register("kvcrush")
@dataclass(frozen=True, slots=True)
class KVCrush(CrushedShare):
    """Keep what the base rule finds important, and tokens that heads treat as they do the rest.

    Attributes:
        base: the rule; what it protects stays protected. It must look at queries or keys.
        seed: of what is drawn by lot.
        share: of the budget left after protection, for representatives; 0: none.
        representatives: inside (they take their share of the cap) or additive (on top of it).
        anchor: random, alternating, mean, zeros, ones; with several random, mean or farthest.
        anchors: how many.
        pick: of a slice, its middle, or random.
        dynamic: a layer takes a part of the share, less where few tokens have most of the scores.
        signatures: recomputed whenever tokens leave, or kept as when a token could first leave.
    """

    cost = "the base rule's for each query head; one distance for each token and anchor"

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
        own = (BITS, UNTIL) if self.takes_notes else ()
        return (*apart(self.base.statistics), *own)

    @property
    def takes_notes(self) -> bool:
        return self.signatures == KEPT

    def ask(self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int) -> Asked:
        requested = CrushedShare.ask(self, view, keep, piece_tokens)
        return replace(requested, known=stored_bits(view)) if self.takes_notes else requested

    def decide(self, view: KVView, keep: Int[Tensor, " lane"], piece_tokens: int = 1) -> Decision:
        requested = self.ask(view, keep, piece_tokens)
        stays = self.stays(requested)
        if not self.takes_notes:
            return Decision(stays)
        return Decision(stays, notes_of(view, requested.all_bits, requested.may_leave))

    def represent(self, requested: Asked, grouped: Marks, count: NDArray[np.int64]) -> Marks:
        signatures = requested.signatures(grouped)
        distance, which = nearest_anchor(signatures, self.anchor, self.anchors, self.seed)
        seeds = (self.seed, requested.numbers) if self.pick == RANDOM else None
        counts = of_each_anchor(which, grouped, count, self.anchors)
        chosen = np.zeros_like(grouped)
        for number in range(self.anchors):
            near = grouped & (which == number) if self.anchors > 1 else grouped
            chosen |= choose_representatives(distance, near, counts[:, number], seeds)
        return chosen

    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        count = CrushedShare.num_representatives(self, units, sums)
        return whole(count * _spread(units, sums)) if self.dynamic else count


def _spread(units: Units, sums: Floats) -> NDArray[np.float64]:
    """[layer] how evenly scores are spread over what may leave: 0 all on a few, 1 all alike."""
    free = units.free
    least = np.where(free, sums, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    above = np.where(free, sums - least, 0.0).astype(np.float64)
    mass = above.sum(axis=1)
    best = (above * units.best(sums, units.room)).sum(axis=1)
    outside = 1 - units.room / np.maximum(count_of(free), 1)
    missed = np.where(mass > 0, 1 - best / np.maximum(mass, 1e-300), outside)
    return np.clip(missed / np.maximum(outside, 1e-12), 0, 1)


# ---- stored --------------------------------------------------------------------------------------

# Signatures that stay with their tokens: written when others leave, read when the next ones do.
#
# Those of tokens that are protected so far, as the newest are, and of layers that lose nothing yet
# are not written: every head would keep all of these, which says nothing about them.

BITS, UNTIL = SignatureBits(), SignedUntil()


def stored_bits(
    view: KVView,
) -> tuple[Bool[Tensor, "layer head slot"], Bool[Tensor, "layer head slot"]]:
    """The bits of each query head that were written down, and where any were.

    Raises:
        PolicyError: the view was made without them.
    """
    until = view.remembered(UNTIL)[:, 0]
    signed = (view.live & (view.positions < until)).repeat_interleave(view.group, dim=0)
    numbers = torch.where(view.live, view.remembered(BITS), 0.0).nan_to_num(0, 0, 0).long()
    heads = torch.arange(view.group, device=numbers.device)
    bits = (numbers[:, None] >> heads[:, None]) & 1
    return _by_layer(view, bits.bool()), _by_layer(view, signed)


def notes_of(
    view: KVView, bits: Bool[Tensor, "layer head slot"], may_leave: Bool[Tensor, "layer slot"]
) -> Mapping[Statistic, Float[Tensor, "..."]]:
    """What to write down of the bits of each query head.

    Args:
        view: with what was written before.
        bits: of each query head.
        may_leave: slots that something is to be known of.
    """
    heads = torch.arange(view.group, device=bits.device)
    numbers = (bits.view(-1, view.group, bits.shape[2]).long() << heads[:, None]).sum(dim=1)
    behind = torch.where(may_leave, view.first_heads(view.positions) + 1, 0).amax(dim=1)
    behind = behind.repeat_interleave(view.heads_per_layer)[:, None, None]
    return {BITS: numbers.float(), UNTIL: torch.maximum(view.remembered(UNTIL), behind.float())}


def _by_layer(
    view: KVView, bits: Bool[Tensor, "lanes_or_heads ..."]
) -> Bool[Tensor, "layer head slot"]:
    """A row for each query head, by layer."""
    return bits.view(-1, view.heads_per_layer * view.group, bits.shape[-1])
