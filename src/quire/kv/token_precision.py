"""Tokens in finer precision than the codec of their pages, in a step.

Promoted tokens (mixed precision) have records of what their codes lost. Sinks and the tokens of the
residual window are stored in full precision. Each layer runs three stages. First, pages that fill
up are encoded, from the step's tokens and from older full-precision tokens; this also encodes the
records of promoted tokens again. Then attention runs. Then the step's tokens overwrite the oldest
tokens of the full-precision window.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import NewSlots
from quire.kernels.coded import CodedPages, CodedPlanes, write_codes
from quire.kernels.device_copies import to_device
from quire.kernels.paging import set_bounds, write_bounds
from quire.kernels.token_precision import (
    FullPrecisionPages,
    PromotedPages,
    records_of,
    stored_record,
)
from quire.kv.flat_batch import DeviceTable, FlatBatch
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore, PageViews
from quire.kv.tables import LaneTable
from quire.layout.token_precision import FullPrecisionTokens, PromotedTokens


@dataclass(frozen=True, slots=True)
class PromotedBuffer:
    """Pages that hold the promoted tokens of a lane group."""

    tokens: PromotedTokens  # number of promoted tokens
    coded: CodedPages
    marks: Tensor  # [page, record] position + 1 of the token; 0 for a free record
    table: LaneTable  # one page per lane
    device_table: DeviceTable  # `table` as a tensor

    def pages(self) -> PromotedPages:
        return PromotedPages(self.coded, self.marks, self.device_table.current())

    def records(self, row: int, lanes: slice, positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """The record of each token at positions [lanes, slots]; -1 for tokens without one."""
        marks = self.marks[self._pages(row)[lanes]]
        return records_of(marks, torch.from_numpy(positions).to(marks.device)).cpu().numpy()

    def put(
        self,
        row: int,
        place: tuple[NDArray[np.int64], NDArray[np.int64]],
        positions: NDArray[np.integer],
        lost: tuple[Tensor, Tensor],
    ) -> None:
        """Encode what codes lost, [token, head, head_dim], at (lane, record) of each token."""
        device = self.marks.device
        lane, record = (torch.from_numpy(index).to(device) for index in place)
        position = torch.from_numpy(np.asarray(positions, dtype=np.int64)).to(device)
        pages = self._pages(row)[lane]
        for side, residual in zip((self.coded.key, self.coded.value), lost, strict=True):
            write_codes(side, pages[:, None], record[:, None], residual)
        self.marks[pages, record] = (position + 1).to(self.marks.dtype)

    def encode_again(
        self,
        side: CodedPlanes,
        pages: Tensor,
        positions: Tensor,
        lost: Float[Tensor, "page head token head_dim"],
    ) -> None:
        """Encode what new codes of whole pages lost, for the tokens that have records."""
        record = records_of(self.marks[pages], positions)
        page, token = (record >= 0).nonzero(as_tuple=True)
        if len(page):
            residual = lost[page, :, token]
            write_codes(side, pages[page][:, None], record[page, token][:, None], residual)

    def _pages(self, row: int) -> Tensor:
        pages = self.table.pages[row, :, 0].astype(np.int64)
        return torch.from_numpy(pages).to(self.marks.device)


def promoted_buffers(
    memory: KVMemory, store: PageStore, tables: Mapping[str, DeviceTable]
) -> dict[str, PromotedBuffer]:
    """Return the promoted-token buffer of each lane group that has one, by the group's name."""
    places = {}
    for group in memory.layout.groups:
        if group.promoted is None:
            continue
        views = store.views(group.page_class)
        assert views.coded is not None, "records hold codes"
        assert views.positions is not None, "records hold the positions of their tokens"
        assert group.of is not None, "promoted tokens are of a group"
        places[group.of] = PromotedBuffer(
            tokens=group.promoted,
            coded=views.coded,
            marks=views.positions,
            table=memory.tables[group.name],
            device_table=tables[group.name],
        )
    return places


@dataclass(frozen=True, slots=True)
class FullPrecisionBuffer:
    """Pages that hold the full-precision tokens of a lane group."""

    tokens: FullPrecisionTokens  # which are kept in full precision
    views: PageViews  # of the pages that hold them
    table: LaneTable  # one page per lane
    device_table: DeviceTable  # `table` as a tensor
    coded: PageViews  # views of the quantized pages
    coded_table: LaneTable  # of the quantized pages


def full_precision_buffers(
    memory: KVMemory, store: PageStore, tables: Mapping[str, DeviceTable]
) -> dict[str, FullPrecisionBuffer]:
    """Return the full-precision buffer of each lane group that has one, by the group's name."""
    return {
        group.of: FullPrecisionBuffer(
            tokens=group.full_precision,
            views=store.views(group.page_class),
            table=memory.tables[group.name],
            device_table=tables[group.name],
            coded=store.views(memory.tables[group.of].group.page_class),
            coded_table=memory.tables[group.of],
        )
        for group in memory.layout.groups
        if group.full_precision is not None and group.of is not None
    }


@dataclass(frozen=True, slots=True)
class FullPages:
    """Pages of a layer that become full in a step."""

    pages: Tensor  # [page] page numbers
    full_precision_pages: Tensor  # [page] with the older tokens of the same lane
    lanes: Tensor  # [page] lane of the layer
    is_fresh: Tensor  # [page, token] whether it belongs to this step
    fresh: Tensor  # [page, token] index in the step if fresh
    records: Tensor  # [page, token] record in `full_precision_pages` otherwise
    positions: Tensor  # [page, token]
    promoted_pages: Tensor  # [page] with records of promoted tokens; 0 if the group has none


class FullPrecisionStep:
    """The full-precision tokens of one lane group in one step."""

    def __init__(
        self,
        buffer: FullPrecisionBuffer,
        batch: FlatBatch,
        lengths: NDArray[np.int64],
        promoted: PromotedBuffer | None = None,
        later: NDArray[np.integer] | None = None,  # tokens of each row in later parts of the step
    ) -> None:
        self._buffer, self._batch, self._promoted = buffer, batch, promoted
        self._later = np.zeros_like(batch.shape.tokens) if later is None else later
        self._lengths = lengths[batch.rows].astype(np.int64)
        group = buffer.table.group
        self._shape = (len(group.layers), group.lanes_per_layer)
        self._chosen, self._pages, self._records = self._newest()
        self._full = self._full_pages() if buffer.tokens.page_tokens > 1 else None

    def pages(self, fresh: tuple[Tensor, Tensor]) -> FullPrecisionPages:
        views = self._buffer.views
        return FullPrecisionPages(
            tokens=self._buffer.tokens,
            key=views.key,
            value=views.value,
            table=self._buffer.device_table.current(),
            lengths=self._lengths,
            starts=self._batch.shape.starts,
            fresh=fresh,
            marks=views.positions,
        )

    def encode(self, layer: int, slots: NewSlots, key: Tensor, value: Tensor) -> bool:
        """Encode pages that become full; False if the codec encodes token by token."""
        if self._full is None or slots.coded is None:
            return False
        views, key_spec = self._buffer.views, slots.coded.key.codec.spec
        sides = ((slots.coded.key, views.key, key), (slots.coded.value, views.value, value))
        for number, (coded, full_precision, fresh) in enumerate(sides):
            if not coded.codec.spec.per_page:
                write_codes(coded, slots.pages, slots.offsets, fresh)
            elif len(self._full[layer].pages):
                # encode pages that have become full
                full = self._full[layer]
                heads, head_dim = full_precision.shape[1], full_precision.shape[3]
                by_lane = fresh.reshape(len(fresh), -1, heads, head_dim)
                new = by_lane[full.fresh, full.lanes[:, None]]  # [page, token, head, head_dim]
                old = full_precision[full.full_precision_pages[:, None], :, full.records]
                vectors = torch.where(full.is_fresh[:, :, None, None], new, old).transpose(1, 2)
                encoded = coded.codec.encode(vectors)
                for plane, codes in zip(coded.planes, encoded, strict=True):
                    plane[full.pages] = codes
                lost = vectors.float() - coded.codec.decode(encoded)
                self._encode_records(self._full[layer], number, lost)
        if not key_spec.per_page:
            write_bounds(slots)
        elif slots.bounds is not None and len(pages := self._full[layer].pages):
            held = torch.full_like(pages, self._buffer.tokens.page_tokens)
            set_bounds(slots.bounds, slots.key, slots.coded.key, pages, held)
        return True

    def _encode_records(self, full: FullPages, side: int, lost: Tensor) -> None:
        if self._promoted is not None:
            coded = (self._promoted.coded.key, self._promoted.coded.value)[side]
            self._promoted.encode_again(coded, full.promoted_pages, full.positions, lost)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the step's tokens in full precision over tokens that have left the window."""
        views = self._buffer.views
        for plane, fresh in ((views.key, key), (views.value, value)):
            heads, head_dim = plane.shape[1], plane.shape[3]
            by_lane = fresh.reshape(len(fresh), self._shape[1], heads, head_dim)
            plane[self._pages[layer], :, self._records] = by_lane[self._chosen]

    def _newest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of the tokens to keep, pages [layers, tokens, lanes] and records [tokens, 1]."""
        batch, tokens = self._batch, self._buffer.tokens
        first = self._lengths - batch.shape.tokens
        position = first[batch.token_row] + batch.token_offset
        is_new = position >= self._lengths[batch.token_row] - tokens.recent
        chosen = np.flatnonzero(is_new | (position < tokens.sinks))
        rows = batch.rows[batch.token_row[chosen]]
        pages = self._buffer.table.pages[rows, :, 0].reshape(len(chosen), *self._shape)
        record = _records(tokens, position[chosen])
        return (
            self._tensor(chosen),
            self._tensor(pages.swapaxes(0, 1)),
            self._tensor(record[:, None]),
        )

    def _full_pages(self) -> tuple[FullPages, ...]:
        """Find the pages of each layer that become full; lanes may have different slot counts."""
        buffer, batch, per_page = self._buffer, self._batch, self._buffer.tokens.page_tokens
        after = buffer.coded_table.num_slots[batch.rows] - self._later[:, None].astype(np.int64)
        before = after - batch.shape.tokens[:, None]
        count = after // per_page - before // per_page
        row, lane = (np.repeat(index, count[count > 0]) for index in np.nonzero(count))
        nth = np.arange(len(row)) - np.repeat(np.cumsum(count[count > 0]), count[count > 0])
        column = after[row, lane] // per_page + nth  # the last full page has nth = -1
        slot = column[:, None] * per_page + np.arange(per_page)
        ahead = slot - before[row, lane][:, None]  # index in the step's tokens if not negative
        position = (self._lengths - batch.shape.tokens)[row][:, None] + ahead
        table_row, lanes = batch.rows[row], self._shape[1]
        pages = buffer.coded_table.pages[table_row, lane, column]
        full_precision_pages = buffer.table.pages[table_row, lane, 0]
        found = (
            pages,
            full_precision_pages,
            lane % lanes,
            ahead >= 0,
            batch.shape.starts[row][:, None] + np.maximum(ahead, 0),
            self._older_records(pages, full_precision_pages, position, ahead < 0),
            position,
            np.zeros_like(pages)
            if self._promoted is None
            else self._promoted.table.pages[table_row, lane, 0],
        )
        layers = [lane // lanes == layer for layer in range(self._shape[0])]
        return tuple(FullPages(*(self._tensor(x[of]) for x in found)) for of in layers)

    def _older_records(
        self,
        pages: NDArray[np.int32],
        full_precision_pages: NDArray[np.int32],
        position: NDArray[np.int64],
        is_older: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Records [page, token] of the tokens of filled pages that are not of the step."""
        buffer = self._buffer
        if buffer.coded.positions is not None:
            stored = buffer.coded.positions[self._tensor(pages)].cpu().numpy()
            position[is_older] = stored[is_older]
        record = stored_record(
            buffer.tokens,
            buffer.views.positions,
            self._tensor(full_precision_pages)[:, None],
            self._tensor(position),
            torch.arange(position.shape[1], device=buffer.views.whole.device)[None],
        )
        return record.cpu().numpy()

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        device = self._buffer.views.whole.device
        kind = numbers if numbers.dtype == np.bool_ else numbers.astype(np.int64)
        return to_device(kind, device)


def _records(tokens: FullPrecisionTokens, position: NDArray[np.int64]) -> NDArray[np.int64]:
    newest = tokens.sinks + (position - tokens.sinks) % max(1, tokens.recent)
    found: NDArray[np.int64] = np.where(position < tokens.sinks, position, newest)
    return found
