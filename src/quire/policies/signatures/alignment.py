"""Bits of all query heads of a layer for the tokens of each of its KV heads.

    tokens of head a   0 1 2 3      bits of a   1 0 1 1      signature in a   11 00 10 10
    tokens of head b   0 1 4        bits of b   1 0 1        signature in b   11 00 01

Head b has evicted tokens 2 and 3, so its bit is 0 there.
"""

import numpy as np
from numpy.typing import NDArray

from quire.policies.signatures.units import Marks


def aligned_bits(bits: Marks, positions: NDArray[np.integer], per_layer: int) -> Marks:
    """Collect the bits of a layer's heads by token.

    Args:
        bits: [lane, head, slot] bits of each lane's own query heads.
        positions: [lane, slot] position of each slot, ascending; -1 for an empty slot.
        per_layer: lanes of a layer.

    Returns:
        [lane, head of the layer, slot]; undefined for empty slots.
    """
    _, heads, slots = bits.shape
    of_layer = positions.reshape(-1, per_layer, slots)
    own = bits.reshape(-1, per_layer * heads, slots)
    if (of_layer == of_layer[:, :1]).all():
        return own.repeat(per_layer, axis=0)
    found = [_of_layer(own[layer], of_layer[layer], heads) for layer in range(len(own))]
    return np.concatenate(found)


def _of_layer(bits: Marks, positions: NDArray[np.integer], heads: int) -> Marks:
    """[lane, head of the layer, slot] bits of one layer, by token."""
    tokens, place = np.unique(positions, return_inverse=True)
    place = place.reshape(positions.shape)
    by_token = np.zeros((len(bits), len(tokens)), dtype=np.bool_)
    for lane, own in enumerate(place):
        live = positions[lane] >= 0
        by_token[lane * heads : (lane + 1) * heads, own[live]] = bits[
            lane * heads : (lane + 1) * heads, live
        ]
    return np.stack([by_token[:, own] for own in place])
