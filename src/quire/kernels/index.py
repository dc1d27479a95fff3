"""The index of sparse attention (DSA): the tokens to which each query attends.

Every token has an index key. The score of a token for a query is the weighted sum, over the index
heads, of relu(query . key); a query attends to the tokens with the highest scores. A decode step
so reads the index keys of all tokens, but the latents of the selected ones only.

A selection is a set of positions, because the layers that share it can have evicted other tokens.
Rows with at most `topk` slots attend to all of them.
Source: DeepSeek-V3.2-Exp, section 2.1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    LaneSlots,
    LayerPages,
    StepShape,
    TokenIndex,
    dims_of,
)
from quire.kernels.coded import decode_slots
from quire.kernels.device_copies import to_device
from quire.kernels.gathered import lane_positions
from quire.kernels.paging import page_numbers
from quire.layout.pages import KEY, VALUE

BLOCK_NUMBERS = 16 * 1024 * 1024
"""Numbers that scores, or the gathered keys of decode rows, take at a time."""

NOT_SELECTED = -1


@dataclass(frozen=True, slots=True)
class IndexedRows:
    """Rows of a step with the same number of new tokens in one layer.

    Attributes:
        pages: of the layer, for all rows of the step.
        rows: [row] indices of the rows in the step.
        tokens: [row, new token] indices in the flat batch.
        held: [row] live slots.
        width: slots that are gathered: those of the pages of the longest row.
    """

    pages: LayerPages
    rows: Int[Tensor, " row"]
    tokens: Int[Tensor, "row new_token"]
    held: Int[Tensor, " row"]
    width: int

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, lanes and columns of the page table."""
        columns = torch.arange(self.width // self.pages.page_tokens, device=self.rows.device)
        return self.rows, torch.zeros_like(self.rows), columns[None]

    @property
    def keys(self) -> Float[Tensor, "row slot index_dim"]:
        """Index keys, float32; undefined for free slots."""
        assert self.pages.index is not None, "only such layers select"
        return self.pages.index[page_numbers(self.pages, *self.places)].flatten(1, 3).float()

    @property
    def positions(self) -> Int[Tensor, "row slot"]:
        """Logical positions of the slots; undefined for free slots."""
        rows, lanes, columns = self.places
        columns = columns.expand(len(rows), -1)
        return lane_positions(self.pages, rows, lanes, columns)

    @property
    def own(self) -> Int[Tensor, "row new_token 1"]:
        """Slots of the new tokens."""
        count = self.tokens.shape[1]
        ahead = torch.arange(count, device=self.rows.device) - count
        return (self.held[:, None] + ahead)[:, :, None]

    @property
    def slots(self) -> Int[Tensor, " slot"]:
        """Numbers of all gathered slots."""
        return torch.arange(self.width, device=self.rows.device)


@dataclass(frozen=True, slots=True)
class IndexedLayer:
    """Attention of a layer to the tokens that an index selects.

    Attributes:
        index: of the batch.
        step: rows of the batch.
        slots: [row] their live slots in the layer.
        pages: of the layer, for all rows.
        alone: whether each row is computed alone, such that it depends on no other row.
    """

    index: TokenIndex
    step: StepShape
    slots: NDArray[np.int32]
    pages: LayerPages
    alone: bool = False

    def select(self) -> NDArray[np.int64]:
        """Select the tokens of each query, unless an earlier layer did.

        Returns:
            The rows with more slots than are selected; the others attend to all.
        """
        index = self.index
        if index.rows is None:
            index.rows = np.flatnonzero(self.slots > index.topk)
            shape = (int(self.step.tokens.sum()) if len(index.rows) else 0, index.topk)
            index.positions = index.key.new_full(shape, NOT_SELECTED, dtype=torch.int64)
            for some in self._groups(index.rows, sum(index.query.shape[1:])):
                self._select(some, index.positions)
        return index.rows

    def _groups(self, rows: NDArray[np.int64], slot_numbers: int) -> Iterator[IndexedRows]:
        """Yield decode rows in blocks, with `slot_numbers` for a slot, and other rows alone."""
        decodes = self.step.tokens[rows] == 1
        count = self._rows_of(slot_numbers * int(self.slots[rows].max(initial=1)))
        for first in range(0, int(decodes.sum()), count):
            yield self._rows(rows[decodes][first : first + count])
        for row in rows[~decodes]:
            yield self._rows(np.array([row]))

    def _rows_of(self, numbers: int) -> int:
        """Rows of a block, with these numbers each."""
        return 1 if self.alone else max(1, BLOCK_NUMBERS // numbers)

    def _rows(self, rows: NDArray[np.int64]) -> IndexedRows:
        pages, device = self.pages, self.pages.rows.device
        tokens = self.step.starts[rows, None] + np.arange(self.step.tokens[rows[0]])
        row, token, held = (to_device(x, device) for x in (rows, tokens, self.slots[rows]))
        return IndexedRows(pages, row, token, held, self._width(rows))

    def _width(self, rows: NDArray[np.int64]) -> int:
        page_tokens = self.pages.page_tokens
        return -(-int(self.slots[rows].max()) // page_tokens) * page_tokens

    def _select(self, some: IndexedRows, positions: Tensor) -> None:
        index, by_slot, keys = self.index, some.positions, some.keys.transpose(1, 2)
        count, heads = len(some.rows), index.query.shape[1]
        block = max(1, BLOCK_NUMBERS // (heads * count * some.width))
        for first in range(0, some.tokens.shape[1], block):
            token, own = (x[:, first : first + block] for x in (some.tokens, some.own))
            query = index.query[token].float().flatten(1, 2)
            products = (torch.bmm(query, keys) * index.scale).relu_()
            products = products.view(count, -1, heads, some.width)
            scores = torch.matmul(index.weights[token].unsqueeze(2), products).squeeze(2)
            seen = some.slots <= own
            slot = scores.masked_fill_(~seen, -torch.inf).topk(index.topk, dim=2).indices
            found = by_slot.gather(1, slot.flatten(1)).view_as(slot)
            positions[token] = found.masked_fill_(~seen.gather(2, slot), NOT_SELECTED)

    def seen(self, rows: NDArray[np.int64]) -> Bool[Tensor, "num_tokens slot"]:
        """Return the slots of the layer to which the queries of some rows attend.

        Args:
            rows: some of `select`, ascending; only their tokens are in the result. It has all slots
                of the pages of the longest row.
        """
        num_tokens, first = self.step.tokens[rows], np.zeros(len(self.slots), dtype=np.int64)
        first[rows] = self.step.starts[rows] - (np.cumsum(num_tokens) - num_tokens)
        shape, device = (int(num_tokens.sum()), self._width(rows)), self.pages.rows.device
        found = torch.zeros(shape, dtype=torch.bool, device=device)
        for some in self._groups(rows, 1):
            token = some.tokens - to_device(first, device)[some.rows, None]
            found[token, : some.width] = self._seen(some)
        return found

    def _seen(self, some: IndexedRows) -> Bool[Tensor, "row new_token slot"]:
        assert self.index.positions is not None, "the first layer selects"
        selected, by_slot = self.index.positions[some.tokens], some.positions
        length, live = some.width, some.slots < some.held[:, None]
        is_ordered = self.pages.positions is None
        if not is_ordered:
            by_slot = by_slot.masked_fill(~live, 0)
            length = int(torch.maximum(by_slot.max(), selected.max())) + 1
        # column 0 is for what is not selected
        marks = selected.new_zeros((*some.tokens.shape, 1 + length), dtype=torch.bool)
        marks = marks.scatter_(2, selected - NOT_SELECTED, value=True)[:, :, 1:]
        if is_ordered:
            return marks
        marks = marks.gather(2, by_slot[:, None].expand(-1, some.tokens.shape[1], -1))
        marks &= live[:, None]
        # a layer that has evicted all of them: the query attends to its own token
        return marks | ((some.slots == some.own) & ~marks.any(dim=2, keepdim=True))

    def attend_decode(
        self,
        backend: AttentionBackend,
        math: AttentionMath,
        query: Float[Tensor, "row num_heads joined_dim"],
        rows: NDArray[np.int64],
        column_sums: Float[Tensor, "row num_heads slot"] | None,
    ) -> Float[Tensor, "row num_heads latent_dim"]:
        """Attend to copies of the latents of selected slots, for decode rows; read no others.

        Args:
            backend: attends to the copies.
            math: with joined keys.
            query: folded queries of these rows.
            rows: some of `select`, with one new token each and no tokens in full precision.
            column_sums: of these rows, overwritten.
        """
        parts: list[Tensor] = []
        block = self._rows_of(self.index.topk * sum(dims_of(self.pages)))
        for first in range(0, len(rows), block):
            part = slice(first, first + block)
            slots, counts = self._slots(self._rows(rows[part]))
            pages = self._copied(rows[part], slots, query.dtype)
            lanes, step = LaneSlots(counts, None), StepShape.of(np.ones_like(counts[:, 0]))
            slot_bytes = sum(dims_of(pages)) * query.itemsize
            plan = backend.plan(step, lanes, pages.page_tokens, slot_bytes)
            sums = None
            if column_sums is not None:
                sums = column_sums.new_zeros(*query[part].shape[:2], slots.shape[1])
            unused = query[:0], query[:0]  # decode rows read their own token from pages
            parts.append(backend.attend(plan, pages, math, query[part], unused, column_sums=sums))
            if column_sums is not None and sums is not None:
                column_sums[part] = 0
                column_sums[part].scatter_add_(2, slots[:, None].expand_as(sums), sums)
        return torch.cat(parts)

    def _slots(self, some: IndexedRows) -> tuple[Tensor, NDArray[np.int32]]:
        """Return the selected slots [row, topk] of decode rows, and their number [row, 1]."""
        if self.pages.positions is None:
            assert self.index.positions is not None, "the first layer selects"
            slots = self.index.positions[some.tokens[:, 0]]
            return slots, np.full((len(slots), 1), slots.shape[1], dtype=np.int32)
        marks = self._seen(some)[:, 0].to(torch.uint8)
        seen, slots = marks.topk(min(self.index.topk, some.width), dim=1)
        counts = seen.sum(dim=1, keepdim=True, dtype=torch.int32).cpu().numpy()
        return slots.masked_fill(seen == 0, 0), counts

    def _copied(self, rows: NDArray[np.int64], slots: Tensor, dtype: torch.dtype) -> LayerPages:
        """Copy, or decode, slots [row, slot] to pages of their own."""
        pages, (count, selected), device = self.pages, slots.shape, slots.device
        page_tokens, (key_dim, value_dim) = pages.page_tokens, dims_of(pages)
        columns, row = -(-selected // page_tokens), to_device(rows, device)
        num_pages, numbers_of = count * columns, page_tokens * (key_dim + value_dim)
        arena = torch.empty(num_pages * numbers_of, dtype=dtype, device=device)
        key, value = (  # explicit strides: a view of one page would not have that of pages
            arena.as_strided(
                (num_pages, 1, page_tokens, dim), (numbers_of, page_tokens * dim, dim, 1), begin
            )
            for dim, begin in ((key_dim, 0), (value_dim, page_tokens * key_dim))
        )
        table = torch.arange(num_pages, dtype=torch.int32, device=device).view(count, 1, columns)
        target = torch.arange(selected, device=device)
        page, place = table[:, 0].long()[:, target // page_tokens], target % page_tokens
        numbers = page_numbers(pages, row, torch.zeros_like(row), slots // page_tokens)
        offsets = slots % page_tokens
        for copy, name in ((key, KEY), (value, VALUE)):
            if pages.coded is None:
                found = getattr(pages, name)[numbers, :, offsets]
            else:
                side, lanes = getattr(pages.coded, name), torch.zeros_like(slots)
                found = decode_slots(side, numbers, offsets, lanes)
            copy[page, :, place] = found.to(dtype)
        return LayerPages(key, value, table, torch.arange(count, device=device), 0, 1)


def indexed_layer(
    math: AttentionMath,
    step: StepShape,
    slots: NDArray[np.int32],
    pages: LayerPages,
    *,
    alone: bool = False,
) -> IndexedLayer | None:
    """Return the attention of a layer by its index; None: its queries attend to all tokens."""
    return None if math.index is None else IndexedLayer(math.index, step, slots[:, 0], pages, alone)
