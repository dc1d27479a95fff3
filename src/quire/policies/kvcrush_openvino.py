"""KVCrush as implemented in OpenVINO GenAI: pages, and one bit for each of their tokens.

1. The bit of a token is set if the token is in the better half of all evictable tokens by the
attention that the layer's query heads have accumulated for it. The base rule may divide that
attention by the number of queries that have seen the token (`average`, `roco`); the bits use it
undivided. The signature of a page is the bits of its tokens; it has no bits of heads.
2. The base rule selects the n pages to evict. They are sorted by the Hamming distance to one
anchor, and every (n // blocks)-th page is retained instead.
3. These pages are added to the written cap.

Source: OpenVINO GenAI, `kvcrush` of its cache eviction (pull requests 2211, 2523 and 2678), from
its description. KVCrush (Jha et al. 2025) is the rule `kvcrush`.

Differs from the paper: see above; only the name, the anchor and the spread over distances are
shared. Differs from OpenVINO: scores and accumulated attention are the base rule's, without its
maximum over seven neighbours. A base that accumulates no attention (`expected_attention`,
`keydiff`) uses its score for the bits. Ties in distance retain the lower position. The random
anchor is drawn once per layer and not at each call.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.policies.choose import best_of, count_of
from quire.policies.crushed import Crushed
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.signatures.anchors import (
    MEAN,
    Signatures,
    anchor_distance,
    check_anchor,
    pack,
)
from quire.policies.signatures.context import SelectionContext
from quire.policies.signatures.units import Marks, Units


@register("kvcrush_openvino")
@dataclass(frozen=True, slots=True)
class KVCrushOpenVINO(Crushed):
    """Retain the base rule's pages, and some of the others, spread over distances.

    Attributes:
        base: the rule; tokens it protects are always retained. It must read queries or keys.
        seed: seed of a random anchor.
        sets: layer (one retained set for all heads of a layer) or head (one for each KV head).
        blocks: number of pages retained in addition to the cap.
        anchor: random, alternating, mean, zeros or ones.
    """

    cost = "the base rule for each query head; one distance for each page"

    blocks: int = 2
    anchor: str = MEAN

    def __post_init__(self) -> None:
        Crushed.__post_init__(self)
        check_at_least(1, blocks=self.blocks)
        check_anchor(self.anchor)

    @property
    def needs_pieces(self) -> bool:
        return True

    @property
    def cap_hint(self) -> str:
        return "raise cap, or lower blocks or every"

    def min_free(self, piece_tokens: int) -> int:
        return self.blocks * piece_tokens

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        del kept
        return self.blocks * piece_tokens

    def num_representatives(self, units: Units) -> NDArray[np.int64]:
        return np.minimum(units.num_retained, self.blocks)

    def represent(
        self, context: SelectionContext, grouped: Marks, count: NDArray[np.int64]
    ) -> Marks:
        units = context.units
        bits = units.side_by_side(_better_half(context)[:, None])
        # anchor=mean is the majority over all evictable pages
        signatures = Signatures(pack(bits), bits.shape[1], units.free, context.numbers)
        distance = anchor_distance(signatures, self.anchor, self.seed)
        return _evenly_spaced(distance, grouped, count)


def _better_half(context: SelectionContext) -> Marks:
    """[layer, column] better half of the evictable slots, by accumulated attention."""
    units = context.units
    may = units.slots(units.free)
    return best_of(context.mean_accumulated, may, count_of(may) // 2)


def _evenly_spaced(distance: NDArray[np.int64], grouped: Marks, count: NDArray[np.int64]) -> Marks:
    """Mark every (n // count)-th of the n grouped units, in the order of (distance, position)."""
    chosen = np.zeros_like(grouped)
    units = grouped.shape[1]
    places = np.arange(units)
    order = np.where(grouped, distance * units + places, np.iinfo(np.int64).max).argsort(axis=1)
    step = count_of(grouped) // np.maximum(count, 1)
    taken = (places % np.maximum(step, 1)[:, None] == 0) & (places < (step * count)[:, None])
    layer, place = np.nonzero(taken)
    chosen[layer, order[layer, place]] = True
    return chosen
