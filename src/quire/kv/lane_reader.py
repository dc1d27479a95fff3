"""A policy's view of one sequence's lanes: slots sorted by position, one view lane per KV head.

    table lane     slots in storage order    2 0 3 .        positions 9 1 4
    view lanes     slots by position         0 1 2          positions 1 4 9, for each of its heads

`unsort` converts a policy's mask over the view to storage order. A view covers whole layers, so a
large model can be read a few layers at a time.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import PolicyError
from quire.kernels.coded import CodedPages, CodedPlanes, decode_slots
from quire.kernels.device_copies import to_device
from quire.kernels.token_precision import (
    decode_records,
    in_full_precision,
    record_of,
    records_of,
    stored_record,
)
from quire.kv.full_precision import FullPrecisionBuffer
from quire.kv.mixed_precision import PromotedBuffer
from quire.kv.slot_order import SlotOrder, by_position
from quire.kv.statistics.pages import StatisticPages
from quire.kv.step import PagedKV
from quire.kv.store import PageViews
from quire.kv.stored_positions import stored_positions
from quire.layout.pages import LaneGroup
from quire.layout.statistics import Statistic


class LaneReader:
    """The lanes of some layers of one group for one row. Valid until the row changes.

    Args:
        group: name of the lane group; the group has no window.
        layers: consecutive indices of layers in the group; None for all.
        whole_window: read every token that is stored in full precision from there, not only those
            that the newest query reads so.
    """

    def __init__(
        self,
        kv: PagedKV,
        group: str,
        row: int,
        layers: range | None = None,
        *,
        whole_window: bool = False,
    ) -> None:
        self._kv, self.row, self._whole_window = kv, row, whole_window
        self._table = kv.memory.tables[group]
        self._group: LaneGroup = self._table.group
        chosen = range(len(self._group.layers)) if layers is None else layers
        per_layer = self._group.lanes_per_layer
        self.lanes = slice(chosen.start * per_layer, chosen.stop * per_layer)
        self.layers = tuple(self._group.layers[layer] for layer in chosen)
        self._order = self._sort()

    @property
    def heads_per_layer(self) -> int:
        return self._group.lanes_per_layer * self._group.page_class.heads

    @cached_property
    def positions(self) -> Int[Tensor, "lane slot"]:
        """Logical positions, ascending; -1 past a lane's last slot. A lane is a KV head."""
        return self._tensor(self._by_head(self.lane_positions))

    @property
    def lane_positions(self) -> NDArray[np.int32]:
        """Logical positions for each lane of the table, [lanes, slots]; a copy."""
        return self._order.positions.copy()

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """The row's attention statistics of these layers, by the name of the statistic.

        Per-slot statistics are [lane, slot], 0 past a lane's last slot. Other statistics are
        [lane, record, number].
        """
        places = self._kv.statistics.get(self._group.name, [])
        return {
            place.statistic.name: self._statistic(place)
            for place in places
            if place.table.active[self.row]
        }

    def note(self, statistic: Statistic, numbers: Float[Tensor, "..."]) -> None:
        """Overwrite a statistic of the row for these layers, in the order of the view.

        Args:
            statistic: a declared statistic; its pages are private to the row.
            numbers: [lane, slot] if the statistic is per slot, else [lane, record, number].
        """
        places = self._kv.statistics.get(self._group.name, [])
        [place] = [one for one in places if one.statistic == statistic]
        if statistic.per_slot:
            self._put(place, self._order.slot, self._order.live, numbers[:, :, None])
        else:
            records = np.arange(numbers.shape[1])[None].repeat(len(self._order.slot), axis=0)
            self._put(place, records, np.ones_like(records, dtype=bool), numbers)

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        """Return the stored keys, decoded to float32; zeros past a lane's last slot."""
        views = self._views
        kept = None if self._kept is None else self._kept.views.key
        return self._gather(views.key, _key, kept)

    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        """Return the stored values, decoded to float32; zeros past a lane's last slot."""
        views = self._views
        kept = None if self._kept is None else self._kept.views.value
        return self._gather(views.value, _value, kept)

    def lost(
        self, lane: NDArray[np.int64], index: NDArray[np.int64]
    ) -> tuple[Float[Tensor, "token head head_dim"], Float[Tensor, "token head head_dim"]]:
        """Return what the codes of tokens of the full-precision window lost, of keys and values.

        Args:
            lane: [token] lane, counted from the first of the reader.
            index: [token] index of the token in the order of positions.
        """
        kept = self._kept
        assert kept is not None, "the group keeps full-precision tokens"
        at, tokens = (self._tensor(lane), self._tensor(index)), self._group.page_class.tokens
        places = self._places(tokens)
        pages = self._tensor(kept.table.pages[self.row, self.lanes, 0])[at[0]]
        record = record_of(kept.tokens, self._tensor(self._order.positions)[at])
        held = self._order.live.sum(axis=1)[lane]
        is_coded = self._order.slot[lane, index] < held // tokens * tokens
        sides = []
        for side, plane in ((_key, kept.views.key), (_value, kept.views.value)):
            exact, decoded = plane[pages, :, record].float(), self._decoded(side, *places)[at]
            residual = exact - decoded
            if side(self._coded).codec.spec.per_page:  # the last page is encoded when it is full
                residual[~self._tensor(is_coded)] = 0
            sides.append(residual)
        return sides[0], sides[1]

    def in_storage_order(
        self, vectors: Float[Tensor, "lane slot head_dim"]
    ) -> Float[Tensor, "table_lane head slot head_dim"]:
        by_lane = vectors.view(-1, self._group.page_class.heads, *vectors.shape[1:])
        slot = self._tensor(self._order.slot)[:, None, :, None].expand_as(by_lane)
        return torch.empty_like(by_lane).scatter_(2, slot, by_lane)

    def unsort(self, keep: Bool[Tensor, "lane slot"]) -> NDArray[np.bool_]:
        """Convert a mask over the view to [lanes of the table, slots] in storage order.

        Raises:
            PolicyError: KV heads that share pages retain different tokens.
        """
        heads = self._group.page_class.heads
        by_lane = keep.cpu().numpy().reshape(-1, heads, keep.shape[1])
        if (by_lane != by_lane[:, :1]).any():
            raise PolicyError(
                f"heads of group {self._group.name!r} share pages and must retain the same tokens, "
                "but the policy retains different tokens per head; it needs one-head pages"
            )
        by_position = torch.from_numpy(by_lane[:, 0] & self._order.live)
        by_slot = torch.empty_like(by_position)
        stored: NDArray[np.bool_] = by_slot.scatter_(
            1, torch.from_numpy(self._order.slot), by_position
        ).numpy()
        return stored

    # ---- order ---------------------------------------------------------------------------------

    def _sort(self) -> SlotOrder:
        held = self._table.num_slots[self.row, self.lanes]
        slot = np.arange(int(held.max(initial=0)))
        live = slot < held[:, None]
        return by_position(self.stored_positions[:, : len(slot)], live)

    @property
    def stored_positions(self) -> NDArray[np.int32]:
        """Positions [lanes, slots] in storage order; undefined past a lane's last slot."""
        return stored_positions(self._kv, self._group.name, self.row, self.lanes)

    # ---- bytes ---------------------------------------------------------------------------------

    @property
    def _coded(self) -> CodedPages:
        coded = self._views.coded
        assert coded is not None, "the pages hold codes"
        return coded

    @property
    def _views(self) -> PageViews:
        return self._kv.store.views(self._group.page_class)

    def _pages(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return page numbers [lanes, capacity]; page 0 for entries without a page."""
        return np.maximum(pages[self.row, self.lanes], 0)

    def _statistic(self, place: StatisticPages) -> Tensor:
        if place.statistic.per_slot:
            return self._gather_numbers(place.numbers, place.table.pages)
        records = place.group.records
        assert records is not None, "what is not per slot has a fixed number of records"
        column, offset = np.divmod(np.arange(records), place.group.page_class.tokens)
        pages = self._tensor(self._pages(place.table.pages)[:, column])
        found = place.numbers[pages, :, self._tensor(offset)]
        return found.transpose(1, 2).flatten(0, 1)

    def _put(
        self,
        place: StatisticPages,
        record: NDArray[np.int64],
        live: NDArray[np.bool_],
        numbers: Float[Tensor, "lane record width"],
    ) -> None:
        """Write the live records [lanes of the table, record] of all heads of a lane."""
        lane, column = np.nonzero(live)
        page, offset = np.divmod(record[lane, column], place.group.page_class.tokens)
        pages = self._tensor(self._pages(place.table.pages)[lane, page])
        heads = numbers.view(len(live), -1, *numbers.shape[1:])[
            self._tensor(lane), :, self._tensor(column)
        ]
        place.numbers[pages, :, self._tensor(offset)] = heads

    @property
    def _kept(self) -> FullPrecisionBuffer | None:
        return self._kv.full_precision.get(self._group.name)

    @property
    def promoted(self) -> PromotedBuffer | None:
        """Buffer of the group's mixed-precision tokens; None if the group has none."""
        return self._kv.promoted.get(self._group.name)

    def _gather(
        self, plane: Tensor, side: Callable[[CodedPages], CodedPlanes], kept: Tensor | None
    ) -> Tensor:
        """Gather a plane's live slots by position as float32 [KV heads, slots, width]."""
        if self._views.coded is None:
            found = self._copied(plane)
        else:
            found = self._decoded(side, *self._places(plane.shape[2]))
        if self.promoted is not None:
            self._add_promoted(found, side(self.promoted.coded), self.promoted)
        if kept is not None:
            self._write_full_precision(found, kept)
        if not self._order.live.all():
            found[~self._tensor(self._order.live)] = 0  # free slots may hold anything
        return found.transpose(1, 2).flatten(0, 1)

    def _copied(self, plane: Tensor) -> Tensor:
        """Copy plain slots, [lane, slot, head, width] as float32: whole pages, then slots.

        Pages and the vectors of a slot are contiguous, so this is three times as fast as indexing
        slot by slot.
        """
        heads, tokens, width = plane.shape[1:]
        lanes, slots = self._order.slot.shape
        columns = -(-slots // tokens)
        pages = self._tensor(self._pages(self._table.pages)[:, :columns].reshape(-1))
        vectors = plane.index_select(0, pages).transpose(1, 2).reshape(-1, heads, width)
        first = np.arange(lanes)[:, None] * (columns * tokens)
        found = vectors.index_select(0, self._tensor((first + self._order.slot).reshape(-1)))
        return found.view(lanes, slots, heads, width).float()

    def _places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the slots, each [lane, slot]."""
        column, offset = np.divmod(self._order.slot, tokens)
        pages = np.take_along_axis(self._pages(self._table.pages), column, axis=1)
        return self._tensor(pages), self._tensor(offset)

    def _decoded(
        self, side: Callable[[CodedPages], CodedPlanes], pages: Tensor, offsets: Tensor
    ) -> Tensor:
        """Decode slots [lane, slot] layer by layer: each layer may have its own constants."""
        per_layer = self._group.lanes_per_layer
        lanes = torch.arange(per_layer, device=pages.device)[:, None]
        found = []
        for index, layer in enumerate(self.layers):
            coded = self._kv.coded.of(self._group.page_class, layer)
            assert coded is not None, "the pages hold codes"
            part = slice(index * per_layer, (index + 1) * per_layer)
            found.append(decode_slots(side(coded), pages[part], offsets[part], lanes))
        return torch.cat(found)

    def _add_promoted(self, found: Tensor, side: CodedPlanes, place: PromotedBuffer) -> None:
        pages = self._tensor(self._pages(place.table.pages)[:, 0])
        record = records_of(place.marks[pages], self._tensor(self._order.positions))
        lane, slot = ((record >= 0) & self._tensor(self._order.live)).nonzero(as_tuple=True)
        found[lane, slot] += decode_records(side, pages[lane], record[lane, slot])

    def _write_full_precision(self, found: Tensor, kept: Tensor) -> None:
        """Overwrite tokens that the newest query reads in full precision."""
        place, order = self._kept, self._order
        assert place is not None, "the group keeps full-precision tokens"
        positions, slots = (self._tensor(x) for x in (order.positions, order.slot))
        held = self._tensor(order.live.sum(axis=1)[:, None])
        newest = torch.full_like(held, int(self._kv.memory.lengths[self.row]) - 1)
        wanted = in_full_precision(place.tokens, positions, slots, newest, held - 1)
        if self._whole_window:
            wanted |= positions > newest - place.tokens.recent
        lane, slot = (wanted & self._tensor(order.live)).nonzero(as_tuple=True)
        pages = self._tensor(place.table.pages[self.row, self.lanes, 0])[lane]
        record = stored_record(
            place.tokens, place.views.positions, pages, positions[lane, slot], slots[lane, slot]
        )
        found[lane, slot] = kept[pages, :, record].float()

    def _gather_numbers(self, plane: Tensor, pages: NDArray[np.int32]) -> Tensor:
        """Gather a plane with one number per slot, [KV heads, slots]: first pages, then slots.

        The numbers of a page are contiguous, so this is much faster than gathering slot by slot.
        """
        heads, tokens = plane.shape[1:3]
        columns = -(-self._order.slot.shape[1] // tokens)
        numbers = self._tensor(self._pages(pages)[:, :columns].reshape(-1))
        found = plane.index_select(0, numbers)
        shape = len(self._order.slot), columns, heads, tokens
        by_head = found.view(shape).transpose(1, 2).reshape(shape[0], heads, columns * tokens)
        order = self._tensor(self._order.slot)[:, None].expand(-1, heads, -1)
        free = self._tensor(~self._order.live)[:, None]
        # free slots may hold anything
        return by_head.gather(2, order).masked_fill_(free, 0.0).flatten(0, 1)

    def _by_head(self, by_lane: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.repeat(by_lane, self._group.page_class.heads, axis=0)

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        whole = numbers.astype(np.int64) if numbers.dtype == np.int32 else numbers
        return to_device(whole, self._kv.store.device)


def _key(coded: CodedPages) -> CodedPlanes:
    return coded.key


def _value(coded: CodedPages) -> CodedPlanes:
    return coded.value
