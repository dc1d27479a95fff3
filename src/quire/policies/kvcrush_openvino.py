"""KVCrush as OpenVINO GenAI ships it: pages, and one bit for each of their tokens.

1. A token's bit: is it in the better half of all tokens that may leave, by the attention that the
   layer's query heads have accumulated for it? The base rule may divide that attention by the
   number of queries that have seen the token (`average`, `roco`); the bits use it undivided. The
   bits of a page's tokens are its signature: no bit of any head.
2. The base rule chooses the pages that leave. They are sorted by the Hamming distance to one
   anchor, and every (n // blocks)-th of the n stays after all.
3. Their room comes on top of the cap that is written.

Source: OpenVINO GenAI, `kvcrush` of its cache eviction (pull requests 2211, 2523 and 2678), from
its description. KVCrush (Jha et al. 2025) is the rule `kvcrush`.

Differs from the paper: see above; it shares with it the name, the anchor and the spread over
distances. Differs from OpenVINO: scores and accumulated attention are the base rule's, without
its maximum over seven neighbours; a base that accumulates no attention (`expected_attention`,
`keydiff`) gives its score for the bits; equal distances keep the lower position; the random anchor
is drawn once for each layer and not at each call.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.policies.best import Floats, best_of, count_of
from quire.policies.crushed import Asked, Crushed
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.signatures.anchors import (
    MEAN,
    Signatures,
    check_anchor,
    nearest_anchor,
)
from quire.policies.signatures.units import Marks, Units


@register("kvcrush_openvino")
@dataclass(frozen=True, slots=True)
class KVCrushOpenVINO(Crushed):
    """Keep the pages that the base rule keeps, and some of the others, spread over distances.

    Attributes:
        base: the rule; what it protects stays protected. It must look at queries or keys.
        seed: of a random anchor.
        blocks: pages that stay beyond the cap.
        anchor: random, alternating, mean, zeros or ones.
    """

    cost = "the base rule's for each query head; one distance for each page"

    blocks: int = 2
    anchor: str = MEAN

    def __post_init__(self) -> None:
        Crushed.__post_init__(self)
        check_at_least(1, blocks=self.blocks)
        check_anchor(self.anchor, 1)

    @property
    def needs_pieces(self) -> bool:
        return True

    @property
    def more_room(self) -> str:
        return "raise cap, or lower blocks or every"

    def least_free(self, piece_tokens: int) -> int:
        return self.blocks * piece_tokens

    def added_tokens(self, kept: int, piece_tokens: int = 1) -> int:
        del kept
        return self.blocks * piece_tokens

    def num_representatives(self, units: Units, sums: Floats) -> NDArray[np.int64]:
        del sums
        return np.minimum(units.room, self.blocks)

    def represent(self, requested: Asked, grouped: Marks, count: NDArray[np.int64]) -> Marks:
        units = requested.units
        bits = units.side_by_side(_better_half(requested)[:, None])
        # the anchor is what most of all pages that may leave say
        distance, _ = nearest_anchor(
            Signatures(bits, units.free, requested.numbers), self.anchor, 1, self.seed
        )
        return _evenly_spaced(distance, grouped, count)


def _better_half(requested: Asked) -> Marks:
    """[layer, column] the better half of what may leave, by the accumulated attention."""
    units = requested.units
    may = units.slots(units.free)
    return best_of(requested.mean_accumulated, may, count_of(may) // 2)


def _evenly_spaced(distance: NDArray[np.int64], grouped: Marks, count: NDArray[np.int64]) -> Marks:
    """Every (n // count)-th of the n grouped units, in the order of (distance, position)."""
    chosen = np.zeros_like(grouped)
    units = grouped.shape[1]
    places = np.arange(units)
    order = np.where(grouped, distance * units + places, np.iinfo(np.int64).max).argsort(axis=1)
    step = count_of(grouped) // np.maximum(count, 1)
    taken = (places % np.maximum(step, 1)[:, None] == 0) & (places < (step * count)[:, None])
    layer, place = np.nonzero(taken)
    chosen[layer, order[layer, place]] = True
    return chosen
