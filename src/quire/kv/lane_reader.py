"""One row's lanes, read plane by plane: slots sorted by position, one view lane per KV head.

    table lane     slots in storage order    2 0 3 .        positions 9 1 4
    view lanes     slots by position         0 1 2          positions 1 4 9, for each of its heads

`RowLanes` has the order of the slots. A `VectorReader` reads the keys or the values of these slots,
a `StatisticReader` reads and writes a statistic. `RowLanes.unsort` converts a policy's mask over
the view to storage order. A view covers whole layers, so a large model can be read a few layers at
a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
from quire.kv.paged_kv import PagedKV
from quire.kv.statistics import StatisticPages
from quire.layout.pages import KEY, VALUE, LaneGroup
from quire.layout.statistics import Statistic


def stored_positions(
    kv: PagedKV, group: str, row: int, lanes: slice = slice(None)
) -> NDArray[np.int32]:
    """Return logical positions [lanes, slots] in storage order; a copy.

    Positions past a lane's last slot are undefined, and so are positions in staging pages.
    """
    table = kv.memory.tables[group]
    tokens = table.group.page_class.tokens
    num_lanes = len(range(*lanes.indices(table.group.num_lanes)))
    columns = int(table.num_pages[row, lanes].max(initial=0))
    views = kv.store.views(table.group.page_class)
    if views.positions is None:
        first = table.page_positions[row, lanes, :columns]
        stored = np.add(first[:, :, None], np.arange(tokens), dtype=np.int32)
    else:
        pages = np.maximum(table.pages[row, lanes, :columns], 0).reshape(-1).astype(np.int64)
        found = views.positions.index_select(0, torch.from_numpy(pages).to(kv.store.device))
        stored = found.cpu().numpy()
    by_lane: NDArray[np.int32] = stored.reshape(num_lanes, columns * tokens)
    return by_lane


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """Slots of the table's lanes sorted by position; each array is [lanes, slots].

    Past a lane's last slot, positions are -1 and `slot` lists the remaining slot numbers.
    """

    positions: NDArray[np.int32]
    slot: NDArray[np.int64]
    live: NDArray[np.bool_]

    @classmethod
    def of(cls, positions: NDArray[np.int32], live: NDArray[np.bool_]) -> "SlotOrder":
        """Sort the live slots by position; live slots are the first slots of their lanes.

        Position and slot are packed into one integer: `np.sort` is faster than `np.argsort`.
        """
        bits = positions.shape[1].bit_length()
        past_end = int(positions.max(initial=0, where=live)) + 1  # sorts after every live position
        number: type[np.unsignedinteger[Any]] = (
            np.uint32 if past_end < 1 << 32 - bits else np.uint64
        )
        keys = np.where(live, positions, past_end).astype(number)
        keys <<= number(bits)
        keys |= np.arange(positions.shape[1], dtype=number)
        keys.sort(axis=1)
        slot = (keys & number((1 << bits) - 1)).astype(np.int64)
        return cls(np.where(live, (keys >> number(bits)).astype(np.int32), -1), slot, live)


class RowLanes:
    """The lanes of some layers of one group for one row. Valid until the row changes.

    Args:
        group: name of the lane group; the group has no window.
        layers: consecutive indices of layers in the group; None for all.
    """

    def __init__(self, kv: PagedKV, group: str, row: int, layers: range | None = None) -> None:
        self.kv, self.row, self.table = kv, row, kv.memory.tables[group]
        self.group: LaneGroup = self.table.group
        chosen = range(len(self.group.layers)) if layers is None else layers
        per_layer = self.group.lanes_per_layer
        self.lanes = slice(chosen.start * per_layer, chosen.stop * per_layer)
        self.layers = tuple(self.group.layers[layer] for layer in chosen)
        held = self.table.num_slots[row, self.lanes]
        slot = np.arange(int(held.max(initial=0)))
        self.order = SlotOrder.of(self.stored_positions[:, : len(slot)], slot < held[:, None])

    @property
    def heads_per_layer(self) -> int:
        return self.group.lanes_per_layer * self.group.page_class.heads

    @property
    def stored_positions(self) -> NDArray[np.int32]:
        """Positions [lanes, slots] in storage order; undefined past a lane's last slot."""
        return stored_positions(self.kv, self.group.name, self.row, self.lanes)

    @property
    def lane_positions(self) -> NDArray[np.int32]:
        """Logical positions for each lane of the table, [lanes, slots]; a copy."""
        return self.order.positions.copy()

    @cached_property
    def positions(self) -> Int[Tensor, "lane slot"]:
        """Logical positions, ascending; -1 past a lane's last slot. A lane is a KV head."""
        heads = self.group.page_class.heads
        return self.tensor(np.repeat(self.lane_positions, heads, axis=0))

    def in_storage_order(
        self, vectors: Float[Tensor, "lane slot head_dim"]
    ) -> Float[Tensor, "table_lane head slot head_dim"]:
        by_lane = vectors.view(-1, self.group.page_class.heads, *vectors.shape[1:])
        slot = self.tensor(self.order.slot)[:, None, :, None].expand_as(by_lane)
        return torch.empty_like(by_lane).scatter_(2, slot, by_lane)

    def unsort(self, keep: Bool[Tensor, "lane slot"]) -> NDArray[np.bool_]:
        """Convert a mask over the view to [lanes of the table, slots] in storage order.

        Raises:
            PolicyError: KV heads that share pages retain different tokens.
        """
        heads = self.group.page_class.heads
        by_lane = keep.cpu().numpy().reshape(-1, heads, keep.shape[1])
        if (by_lane != by_lane[:, :1]).any():
            raise PolicyError(
                f"heads of group {self.group.name!r} share pages and must retain the same tokens, "
                "but the policy retains different tokens per head; it needs one-head pages"
            )
        by_position = torch.from_numpy(by_lane[:, 0] & self.order.live)
        by_slot = torch.empty_like(by_position)
        stored: NDArray[np.bool_] = by_slot.scatter_(
            1, torch.from_numpy(self.order.slot), by_position
        ).numpy()
        return stored

    def pages(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """The lanes' part [lanes, capacity] of a table's pages; page 0 for entries without one."""
        return np.maximum(pages[self.row, self.lanes], 0)

    def places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the slots by position, each [lane, slot]."""
        column, offset = np.divmod(self.order.slot, tokens)
        pages = np.take_along_axis(self.pages(self.table.pages), column, axis=1)
        return self.tensor(pages), self.tensor(offset)

    def tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        whole = numbers.astype(np.int64) if numbers.dtype == np.int32 else numbers
        return to_device(whole, self.kv.store.device)


class VectorReader:
    """Reads the keys or the values of some lanes.

    Args:
        plane: KEY or VALUE.
        whole_window: read every token that is stored in full precision from there, not only those
            that the newest query reads so.
    """

    def __init__(self, lanes: RowLanes, plane: str, *, whole_window: bool = False) -> None:
        self._lanes, self._plane, self._whole_window = lanes, plane, whole_window
        kv, name = lanes.kv, lanes.group.name
        self._views = kv.store.views(lanes.group.page_class)
        self._exact, self._promoted = kv.full_precision.get(name), kv.promoted.get(name)

    def read(self) -> Float[Tensor, "lane slot head_dim"]:
        """Return the vectors by position, decoded to float32; zeros past a lane's last slot."""
        lanes, plane = self._lanes, self._views.planes[self._plane][0]
        if self._views.coded is None:
            found = self._copied(plane)
        else:
            found = self._decoded(*lanes.places(plane.shape[2]))
        if self._promoted is not None:
            self._add_promoted(found)
        if self._exact is not None:
            self._write_full_precision(found)
        if not lanes.order.live.all():
            found[~lanes.tensor(lanes.order.live)] = 0  # free slots may hold anything
        return found.transpose(1, 2).flatten(0, 1)

    def lost(
        self, lane: NDArray[np.int64], index: NDArray[np.int64]
    ) -> Float[Tensor, "token head head_dim"]:
        """Return what the codes of tokens of the full-precision window lost.

        Args:
            lane: [token] lane, counted from the first of the lanes.
            index: [token] index of the token in the order of positions.
        """
        lanes, exact = self._lanes, self._exact
        assert exact is not None, "the group keeps full-precision tokens"
        at, tokens = (lanes.tensor(lane), lanes.tensor(index)), lanes.group.page_class.tokens
        pages = lanes.tensor(exact.table.pages[lanes.row, lanes.lanes, 0])[at[0]]
        record = record_of(exact.tokens, lanes.tensor(lanes.order.positions)[at])
        decoded = self._decoded(*lanes.places(tokens))[at]
        residual = exact.views.planes[self._plane][0][pages, :, record].float() - decoded
        assert self._views.coded is not None, "the pages hold codes"
        if self._side(self._views.coded).codec.spec.per_page:  # the last page is not encoded yet
            held = lanes.order.live.sum(axis=1)[lane]
            is_coded = lanes.order.slot[lane, index] < held // tokens * tokens
            residual[~lanes.tensor(is_coded)] = 0
        return residual

    def _side(self, coded: CodedPages) -> CodedPlanes:
        return coded.key if self._plane == KEY else coded.value

    def _copied(self, plane: Tensor) -> Tensor:
        """Copy plain slots, [lane, slot, head, width] as float32: whole pages, then slots.

        Pages and the vectors of a slot are contiguous, so this is three times as fast as indexing
        slot by slot.
        """
        lanes, (heads, tokens, width) = self._lanes, plane.shape[1:]
        num_lanes, slots = lanes.order.slot.shape
        columns = -(-slots // tokens)
        pages = lanes.tensor(lanes.pages(lanes.table.pages)[:, :columns].reshape(-1))
        vectors = plane.index_select(0, pages).transpose(1, 2).reshape(-1, heads, width)
        first = np.arange(num_lanes)[:, None] * (columns * tokens)
        found = vectors.index_select(0, lanes.tensor((first + lanes.order.slot).reshape(-1)))
        return found.view(num_lanes, slots, heads, width).float()

    def _decoded(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Decode slots [lane, slot] layer by layer: each layer may have its own constants."""
        group, per_layer = self._lanes.group, self._lanes.group.lanes_per_layer
        of_layer = torch.arange(per_layer, device=pages.device)[:, None]
        found = []
        for index, layer in enumerate(self._lanes.layers):
            coded = self._lanes.kv.coded.of(group.page_class, layer)
            assert coded is not None, "the pages hold codes"
            part = slice(index * per_layer, (index + 1) * per_layer)
            found.append(decode_slots(self._side(coded), pages[part], offsets[part], of_layer))
        return torch.cat(found)

    def _add_promoted(self, found: Tensor) -> None:
        lanes, promoted = self._lanes, self._promoted
        assert promoted is not None, "the group has promoted tokens"
        pages = lanes.tensor(lanes.pages(promoted.table.pages)[:, 0])
        record = records_of(promoted.marks[pages], lanes.tensor(lanes.order.positions))
        lane, slot = ((record >= 0) & lanes.tensor(lanes.order.live)).nonzero(as_tuple=True)
        residual = decode_records(self._side(promoted.coded), pages[lane], record[lane, slot])
        found[lane, slot] += residual

    def _write_full_precision(self, found: Tensor) -> None:
        """Overwrite tokens that the newest query reads in full precision."""
        lanes, exact, order = self._lanes, self._exact, self._lanes.order
        assert exact is not None, "the group keeps full-precision tokens"
        positions, slots = (lanes.tensor(x) for x in (order.positions, order.slot))
        held = lanes.tensor(order.live.sum(axis=1)[:, None])
        newest = torch.full_like(held, int(lanes.kv.memory.lengths[lanes.row]) - 1)
        wanted = in_full_precision(exact.tokens, positions, slots, newest, held - 1)
        if self._whole_window:
            wanted |= positions > newest - exact.tokens.recent
        lane, slot = (wanted & lanes.tensor(order.live)).nonzero(as_tuple=True)
        pages = lanes.tensor(exact.table.pages[lanes.row, lanes.lanes, 0])[lane]
        record = stored_record(
            exact.tokens, exact.views.positions, pages, positions[lane, slot], slots[lane, slot]
        )
        found[lane, slot] = exact.views.planes[self._plane][0][pages, :, record].float()


class StatisticReader:
    """Reads and writes a statistic of some lanes, whose pages are private to the row."""

    def __init__(self, lanes: RowLanes, place: StatisticPages) -> None:
        self._lanes, self._place = lanes, place

    def read(self) -> Tensor:
        """[lane, slot] by position if the statistic is per slot, 0 past a lane's last slot.

        Otherwise [lane, record, number].
        """
        lanes, place = self._lanes, self._place
        if place.statistic.per_slot:
            return self._by_position()
        records = place.group.records
        assert records is not None, "what is not per slot has a fixed number of records"
        column, offset = np.divmod(np.arange(records), place.group.page_class.tokens)
        pages = lanes.tensor(lanes.pages(place.table.pages)[:, column])
        return place.numbers[pages, :, lanes.tensor(offset)].transpose(1, 2).flatten(0, 1)

    def _by_position(self) -> Tensor:
        """Gather one number per slot, [KV heads, slots]: first pages, then slots.

        The numbers of a page are contiguous, so this is much faster than gathering slot by slot.
        """
        lanes, plane = self._lanes, self._place.numbers
        heads, tokens = plane.shape[1:3]
        num_lanes, slots = lanes.order.slot.shape
        columns = -(-slots // tokens)
        numbers = lanes.tensor(lanes.pages(self._place.table.pages)[:, :columns].reshape(-1))
        found = plane.index_select(0, numbers).view(num_lanes, columns, heads, tokens)
        by_head = found.transpose(1, 2).reshape(num_lanes, heads, columns * tokens)
        order = lanes.tensor(lanes.order.slot)[:, None].expand(-1, heads, -1)
        free = lanes.tensor(~lanes.order.live)[:, None]
        # free slots may hold anything
        return by_head.gather(2, order).masked_fill_(free, 0.0).flatten(0, 1)

    def write(self, numbers: Float[Tensor, "..."]) -> None:
        """Overwrite the statistic with numbers in the shape of `read`."""
        lanes, place = self._lanes, self._place
        record, live = lanes.order.slot, lanes.order.live
        if place.statistic.per_slot:
            numbers = numbers[:, :, None]
        else:
            record = np.arange(numbers.shape[1])[None].repeat(len(record), axis=0)
            live = np.ones_like(record, dtype=bool)
        lane, column = np.nonzero(live)
        page, offset = np.divmod(record[lane, column], place.group.page_class.tokens)
        pages = lanes.tensor(lanes.pages(place.table.pages)[lane, page])
        heads = numbers.view(len(live), -1, *numbers.shape[1:])[
            lanes.tensor(lane), :, lanes.tensor(column)
        ]
        place.numbers[pages, :, lanes.tensor(offset)] = heads


class LaneReader(RowLanes):
    """Lanes with readers of their planes: what a policy's view of a row reads."""

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return VectorReader(self, KEY).read()

    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        return VectorReader(self, VALUE).read()

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """The attention statistics that the row uses, by the name of the statistic."""
        return {
            place.statistic.name: StatisticReader(self, place).read()
            for place in self._statistics
            if place.table.active[self.row]
        }

    def note(self, statistic: Statistic, numbers: Float[Tensor, "..."]) -> None:
        """Overwrite a declared statistic of the row for these layers, in the order of the view."""
        [place] = [one for one in self._statistics if one.statistic == statistic]
        StatisticReader(self, place).write(numbers)

    @property
    def _statistics(self) -> Sequence[StatisticPages]:
        return self.kv.statistics.get(self.group.name, ())


class JoinedReader:
    """Readers of different layers of one row, for rules that divide a cap over all layers."""

    def __init__(self, readers: Sequence[LaneReader]) -> None:
        self._readers = readers
        self.heads_per_layer = readers[0].heads_per_layer
        self.layers = tuple(layer for reader in readers for layer in reader.layers)

    @property
    def positions(self) -> Int[Tensor, "lane slot"]:
        """Logical positions, ascending; a lane is a KV head."""
        return _joined([reader.positions for reader in self._readers], -1)

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """Attention statistics by name, [lane, ...]."""
        found = [reader.statistics for reader in self._readers]
        return {name: _joined([of[name] for of in found]) for name in found[0]}

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return _joined([reader.keys() for reader in self._readers])

    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        return _joined([reader.values() for reader in self._readers])


def _joined(parts: Sequence[Tensor], filler: int = 0) -> Tensor:
    """Concatenate [lane, slot, ...] tensors, filled up to the longest lanes."""
    longest = max(part.shape[1] for part in parts)
    filled = []
    for part in parts:
        shape = (part.shape[0], longest - part.shape[1], *part.shape[2:])
        filled.append(torch.cat([part, part.new_full(shape, filler)], dim=1))
    return torch.cat(filled)
