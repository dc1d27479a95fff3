"""Bits of all query heads of a layer for the tokens of each of its KV heads.

    tokens of head a   0 1 2 3      bits of a   1 0 1 1      signature in a   11 00 10 10
    tokens of head b   0 1 4        bits of b   1 0 1        signature in b   11 00 01

Head b has evicted tokens 2 and 3, so its bit is 0 there.
"""

import numpy as np
from numpy.typing import NDArray

from quire.policies.signatures.anchors import WORD_BITS, Words, num_words, pack
from quire.policies.signatures.units import Marks

MAX_SPREAD = 16  # positions per slot up to which a table of all positions is small


def aligned_words(
    bits: Marks, must: Marks, positions: NDArray[np.integer], per_layer: int, columns: slice
) -> Words:
    """Collect the bits of a layer's heads by token.

    Args:
        bits: [lane, head, column] bits of each lane's own query heads for a range of its slots.
        must: [lane, slot] slots whose bits are 1.
        positions: [lane, slot] position of each slot, ascending; -1 for an empty slot.
        per_layer: lanes of a layer.
        columns: the range of slots.

    Returns:
        [lane, column, word] one bit for each query head of the layer; undefined for empty slots.
    """
    lanes, slots = positions.shape
    of_layer = positions.reshape(-1, per_layer, slots)
    own = _own_words(bits, must, per_layer, columns)
    by_layer = own.reshape(-1, per_layer, *own.shape[1:])
    if (of_layer[:, 1:] == of_layer[:, :1]).all():
        shared: Words = np.bitwise_or.reduce(by_layer[:, :, columns], axis=1)
        return shared.repeat(per_layer, axis=0)
    place, count = _places(of_layer)
    # one number for each token of each layer, and one for empty slots
    by_token = np.zeros((own.shape[2], len(by_layer) * (count + 1)), dtype=np.uint64)
    place += np.arange(len(by_layer))[:, None, None] * (count + 1)
    for word, tokens in enumerate(by_token):
        for lane in range(per_layer):  # a token is in one slot of a lane
            tokens[place[:, lane]] |= by_layer[:, lane, :, word]
    found = by_token[:, place[:, :, columns].reshape(lanes, -1)]
    return found.transpose(1, 2, 0)


def _own_words(bits: Marks, must: Marks, per_layer: int, columns: slice) -> Words:
    """[lane, slot, word] the bits of a lane's own heads, at their place in the layer's words."""
    lanes, heads, _ = bits.shape
    ones = np.ones((lanes, heads, 1), dtype=np.bool_)
    packed = np.zeros((*must.shape, num_words(heads * per_layer)), dtype=np.uint64)
    packed[:, columns] = _packed(bits, per_layer)
    np.bitwise_or(packed, _packed(ones, per_layer), out=packed, where=must[:, :, None])
    return packed


def _packed(bits: Marks, per_layer: int) -> Words:
    lanes, heads, slots = bits.shape
    if heads * per_layer > WORD_BITS:
        wide = np.zeros((lanes // per_layer, per_layer, per_layer, heads, slots), dtype=np.bool_)
        each = np.arange(per_layer)
        wide[:, each, each] = bits.reshape(-1, per_layer, heads, slots)
        return pack(wide.reshape(lanes, per_layer * heads, slots))
    shift = (np.arange(lanes) % per_layer * heads).astype(np.uint64)
    shifted: Words = pack(bits) << shift[:, None, None]
    return shifted


def _places(positions: NDArray[np.integer]) -> tuple[NDArray[np.int64], int]:
    """Number the tokens of all layers: [layer, lane, slot] numbers from 0, and the highest one."""
    most = int(positions.max(initial=0)) + 1
    if most <= MAX_SPREAD * positions.shape[2]:
        return positions.astype(np.int64) + 1, most
    tokens, place = np.unique(positions, return_inverse=True)
    return place.reshape(positions.shape), len(tokens)
