"""Scores, protected slots and signature bits, from which representatives are selected.

A row is one retained set: a layer (`sets=layer`), whose KV heads hold the same tokens, or one KV
head (`sets=head`). The signature of a token has one bit for every query head of its layer in both
cases. With `sets=head`, the KV heads of a layer may hold different tokens: the bits of a head that
has evicted the token are 0, as that head would not retain it:

    tokens of head a   0 1 2 3      bits of a   1 0 1 1      signature in a   11 00 10 10
    tokens of head b   0 1 4        bits of b   1 0 1        signature in b   11 00 01
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.native.selection import native_selection
from quire.policies.base import ScorePolicy
from quire.policies.choose import Floats, best_slots
from quire.policies.signatures.anchors import WORD_BITS, Signatures, Words, num_words, pack
from quire.policies.signatures.units import Marks, Units
from quire.policies.view import KVView

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


@dataclass(frozen=True)
class SelectionContext:
    """Scores and protected slots of some retained sets.

    Attributes:
        base: the rule.
        view: the sequence.
        rows: the same sequence with one lane per retained set.
        heads: the same sequence with one lane per query head.
        score: the base rule's score for every query head of a row.
        protected: slots that are always retained.
        keep: number of slots to retain in each row.
        piece_tokens: neighbouring slots that are evicted together.
    """

    base: ScorePolicy
    view: KVView
    rows: KVView
    heads: KVView
    score: Float[Tensor, "row head slot"]
    protected: Bool[Tensor, "row slot"]
    keep: Int[Tensor, " row"]
    piece_tokens: int = 1

    @property
    def heads_per_row(self) -> int:
        """KV heads that share a retained set."""
        return len(self.view.positions) // len(self.score)

    @property
    def rows_per_layer(self) -> int:
        """Retained sets of a layer."""
        return self.view.heads_per_layer // self.heads_per_row

    @cached_property
    def units(self) -> Units:
        """The units that are evicted whole."""
        live, protected, keep = map(on_host, (self.rows.live, self.protected, self.keep))
        if self.piece_tokens == 1 and self._signed is not None:
            columns, free, retained, _ = self._signed
            return Units(live, columns, free, retained, free, retained, piece_tokens=1)
        return Units.of(live, protected, keep, self.piece_tokens)

    @property
    def may_leave(self) -> Bool[Tensor, "row slot"]:
        """Slots that are not protected, in rows that evict."""
        loses = self.keep < self.rows.num_slots[:, 0]
        return self.rows.live & ~self.protected & loses[:, None]

    @cached_property
    def mean_score(self) -> Floats:
        """[row, column] mean of the scores over the query heads of a row."""
        return self._mean(self.score)

    @cached_property
    def sums(self) -> Floats:
        """[row, unit] sum of the mean scores of each unit's slots."""
        return self.units.sums(self.mean_score)

    @property
    def mean_accumulated(self) -> Floats:
        """[row, column] mean score before division by the number of queries seen."""
        flat = self.base.accumulated(self.heads, self.score.flatten(0, 1))
        return self._mean(flat.view(self.score.shape))

    def _mean(self, numbers: Float[Tensor, "row head slot"]) -> Floats:
        mean: Floats = on_host(numbers[:, :, self.units.columns].mean(dim=1))
        return mean

    @cached_property
    def own_bits(self) -> Bool[Tensor, "row head column"]:
        """Whether each query head of a row, with the whole budget, retains an evictable token."""
        if type(self.base).choose is ScorePolicy.choose:
            units = self.units
            shared = (units.free_slots[:, None], units.wanted_slots[:, None])
            free, wanted = (torch.from_numpy(part).to(self.score.device) for part in shared)
            return best_slots(self.score[:, :, units.columns], free, wanted)
        return self._chosen_by_heads()[:, :, self.units.columns]

    def marks_of_heads(
        self, free: Bool[Tensor, "row slot"], wanted: Int[Tensor, " row"]
    ) -> Bool[Tensor, "row head slot"]:
        """As `own_bits`, of all slots and on their device."""
        if type(self.base).choose is ScorePolicy.choose:
            return best_slots(self.score, free[:, None], wanted[:, None])
        return self._chosen_by_heads()

    def _chosen_by_heads(self) -> Bool[Tensor, "row head slot"]:
        """Select the slots of each head with a base rule that overrides `choose`."""
        heads = self.score.shape[1]
        protected = self.protected.repeat_interleave(heads, dim=0)
        keep = self.keep.repeat_interleave(heads)
        chosen = self.base.choose(self.heads, self.score.flatten(0, 1), protected, keep)
        return chosen.view(self.score.shape)

    @cached_property
    def words(self) -> Words:
        """[row, column, word] one bit for every query head of a row's layer, packed."""
        if self._signed is not None:
            columns, _, _, found = self._signed
            words = np.zeros((*self.units.free_slots.shape, 1), dtype=np.uint64)
            # the first and the last piece may extend these columns; they are not free then
            first = columns.start - self.units.columns.start
            words[:, first : first + found.shape[1], 0] = found
            return words
        if self.rows_per_layer == 1:
            return pack(on_host(self.own_bits))
        must, positions = map(on_host, (self.protected & self.rows.live, self.rows.positions))
        bits, columns = on_host(self.own_bits), self.units.columns
        return aligned_words(bits, must, positions, self.rows_per_layer, columns)

    @cached_property
    def _signed(self) -> tuple[slice, Marks, NDArray[np.int64], NDArray[np.uint64]] | None:
        """Columns, free slots, their number and words from the C library; None if it cannot."""
        native, score = native_selection(), self.score
        plain = type(self.base).choose is ScorePolicy.choose
        fits = plain and self.width <= WORD_BITS and score.dtype == torch.float32
        if native is None or not fits or score.device.type != "cpu":
            return None
        return native.signed(
            self.rows.live,
            self.protected,
            self.keep.long(),
            self.score,
            self.rows.positions.long(),
            past_end=int(torch.as_tensor(self.view.next_position).max()),
            rows_per_layer=self.rows_per_layer,
        )

    @property
    def width(self) -> int:
        """Bits of a token: the query heads of a layer."""
        return self.score.shape[1] * self.rows_per_layer

    def signatures(self, grouped: Marks | None = None) -> Signatures:
        """Return the bits of a layer's query heads for each unit.

        Args:
            grouped: [row, unit] units that representatives may replace; None for all free ones.
        """
        grouped = self.units.free if grouped is None else grouped
        words = self.units.side_by_side(self.words.transpose(0, 2, 1)).transpose(0, 2, 1)
        return Signatures(np.ascontiguousarray(words), self.width, grouped, self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of each row in the model, from which random choices are drawn."""
        layers = self.view.layers or range(len(self.score) // self.rows_per_layer)
        each = self.rows_per_layer
        return tuple(chain.from_iterable(range(n * each, (n + 1) * each) for n in layers))


def on_host(numbers: Tensor) -> NDArray[Any]:
    """Convert a tensor to a NumPy array; on CPUs the array shares its memory."""
    array: NDArray[Any] = numbers.cpu().numpy()
    return array
