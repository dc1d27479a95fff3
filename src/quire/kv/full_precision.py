"""What a step does about tokens that are kept as the model made them, and about whole pages.

In each layer: pages that fill up are encoded, from the step's tokens and from those kept before;
then attention; and only then the step's tokens take the places of the ones that were kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import NewSlots
from quire.kernels.coded import CodedPlanes, write_codes
from quire.kernels.token_precision import FullPrecisionPages
from quire.kv.flat_batch import DeviceTable, FlatBatch
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore, PageViews
from quire.kv.tables import LaneTable
from quire.layout.token_precision import FullPrecisionTokens


@dataclass(frozen=True, slots=True)
class FullPrecisionBuffer:
    """Where tokens of a lane group are kept.

    Attributes:
        tokens: which they are.
        views: of their pages.
        table: which pages a row has, one a lane.
        device_table: the same as a tensor.
        coded: pages of the group that is kept from.
        coded_table: which of these a row has.
    """

    tokens: FullPrecisionTokens
    views: PageViews
    table: LaneTable
    device_table: DeviceTable
    coded: PageViews
    coded_table: LaneTable


def full_precision_buffers(
    memory: KVMemory, store: PageStore, tables: Mapping[str, DeviceTable]
) -> dict[str, FullPrecisionBuffer]:
    """Where tokens of each lane group are kept, by its name."""
    return {
        group.kept.of: FullPrecisionBuffer(
            tokens=group.kept,
            views=store.views(group.page_class),
            table=memory.tables[group.name],
            device_table=tables[group.name],
            coded=store.views(memory.tables[group.kept.of].group.page_class),
            coded_table=memory.tables[group.kept.of],
        )
        for group in memory.layout.groups
        if group.kept is not None
    }


@dataclass(frozen=True, slots=True)
class FullPages:
    """Pages of a layer that fill up in a step.

    Attributes:
        pages: [page] their numbers.
        full_precision_pages: [page] where older tokens of the same lane are kept.
        lanes: [page] of the layer.
        is_fresh: [page, token] whether a token is the step's.
        fresh: [page, token] which of the step's.
        records: [page, token] where it is kept otherwise.
    """

    pages: Tensor
    full_precision_pages: Tensor
    lanes: Tensor
    is_fresh: Tensor
    fresh: Tensor
    records: Tensor


class FullPrecisionStep:
    """The kept tokens of one lane group in one step.

    Args:
        place: where they are.
        batch: the step.
        lengths: of all rows, the step's tokens included.
    """

    def __init__(
        self, place: FullPrecisionBuffer, batch: FlatBatch, lengths: NDArray[np.int64]
    ) -> None:
        self._place, self._batch = place, batch
        self._lengths = lengths[batch.rows].astype(np.int64)
        group = place.table.group
        self._shape = (len(group.layers), group.lanes_per_layer)
        self._chosen, self._pages, self._records = self._newest()
        self._full = self._full_pages() if place.tokens.page_tokens > 1 else None

    def pages(self, fresh: tuple[Tensor, Tensor]) -> FullPrecisionPages:
        """What attention of a layer gets."""
        views = self._place.views
        assert views.value is not None, "keys and values are kept"
        return FullPrecisionPages(
            tokens=self._place.tokens,
            key=views.key,
            value=views.value,
            table=self._place.device_table.current(),
            lengths=self._lengths,
            starts=self._batch.shape.starts,
            fresh=fresh,
        )

    def encode(self, layer: int, slots: NewSlots, key: Tensor, value: Tensor) -> bool:
        """Encode what can be encoded now, where pages are encoded as a whole.

        Args:
            layer: counted inside the group.
            slots: of the step's tokens.
            key: of the step.
            value: likewise.

        Returns:
            False where tokens are encoded one by one, and the backend writes them.
        """
        if self._full is None or slots.coded is None:
            return False
        views = self._place.views
        assert views.value is not None, "keys and values are kept"
        sides = ((slots.coded.key, views.key, key), (slots.coded.value, views.value, value))
        for coded, kept, fresh in sides:
            if coded.codec.spec.per_page:
                _encode_pages(self._full[layer], coded, kept, fresh)
            else:
                write_codes(coded, slots.pages, slots.offsets, fresh)
        return True

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the step's tokens; those that nobody will ask for as they were make room."""
        views = self._place.views
        assert views.value is not None, "keys and values are kept"
        for plane, fresh in ((views.key, key), (views.value, value)):
            heads, head_dim = plane.shape[1], plane.shape[3]
            by_lane = fresh.reshape(len(fresh), self._shape[1], heads, head_dim)
            plane[self._pages[layer], :, self._records] = by_lane[self._chosen]

    def _newest(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the step to keep, their pages [layers, tokens, lanes], records [tokens, 1]."""
        batch, kept = self._batch, self._place.tokens
        first = self._lengths - batch.shape.tokens
        position = first[batch.token_row] + batch.token_offset
        is_new = position >= self._lengths[batch.token_row] - kept.recent
        chosen = np.flatnonzero(is_new | (position < kept.sinks))
        rows = batch.rows[batch.token_row[chosen]]
        pages = self._place.table.pages[rows, :, 0].reshape(len(chosen), *self._shape)
        record = _records(kept, position[chosen])
        return (
            self._tensor(chosen),
            self._tensor(pages.swapaxes(0, 1)),
            self._tensor(record[:, None]),
        )

    def _full_pages(self) -> tuple[FullPages, ...]:
        """For each layer what fills up; lanes may be unequally full."""
        place, batch, per_page = self._place, self._batch, self._place.tokens.page_tokens
        after = place.coded_table.num_slots[batch.rows].astype(np.int64)
        before = after - batch.shape.tokens[:, None]
        count = after // per_page - before // per_page
        row, lane = (np.repeat(index, count[count > 0]) for index in np.nonzero(count))
        nth = np.arange(len(row)) - np.repeat(np.cumsum(count[count > 0]), count[count > 0])
        column = after[row, lane] // per_page + nth  # the last one has nth = -1
        slot = column[:, None] * per_page + np.arange(per_page)
        ahead = slot - before[row, lane][:, None]  # of the step's first token, where not negative
        position = (self._lengths - batch.shape.tokens)[row][:, None] + ahead
        table_row, lanes = batch.rows[row], self._shape[1]
        found = (
            place.coded_table.pages[table_row, lane, column],
            place.table.pages[table_row, lane, 0],
            lane % lanes,
            ahead >= 0,
            batch.shape.starts[row][:, None] + np.maximum(ahead, 0),
            _records(place.tokens, position),
        )
        layers = [lane // lanes == layer for layer in range(self._shape[0])]
        return tuple(FullPages(*(self._tensor(x[of]) for x in found)) for of in layers)

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        device = self._place.views.whole.device
        kind = numbers if numbers.dtype == np.bool_ else numbers.astype(np.int64)
        return torch.from_numpy(np.ascontiguousarray(kind)).to(device)


def _records(kept: FullPrecisionTokens, position: NDArray[np.int64]) -> NDArray[np.int64]:
    newest = kept.sinks + (position - kept.sinks) % max(1, kept.recent)
    found: NDArray[np.int64] = np.where(position < kept.sinks, position, newest)
    return found


def _encode_pages(full: FullPages, coded: CodedPlanes, kept: Tensor, fresh: Tensor) -> None:
    """Encode pages whose last token is there."""
    if not len(full.pages):
        return
    heads, head_dim = kept.shape[1], kept.shape[3]
    by_lane = fresh.reshape(len(fresh), -1, heads, head_dim)
    new = by_lane[full.fresh, full.lanes[:, None]]  # [page, token, head, head_dim]
    old = kept[full.full_precision_pages[:, None], :, full.records]
    vectors = torch.where(full.is_fresh[:, :, None, None], new, old).transpose(1, 2)
    for plane, codes in zip(coded.planes, coded.codec.encode(vectors), strict=True):
        plane[full.pages] = codes
