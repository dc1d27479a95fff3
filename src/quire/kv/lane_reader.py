"""Lanes of rows, read plane by plane: slots sorted by position, one view lane per KV head.

    table lane     slots in storage order    2 0 3 .        positions 9 1 4
    view lanes     slots by position         0 1 2          positions 1 4 9, for each of its heads

`RowLanes` has the order of the slots. A `VectorReader` reads the keys or the values of these slots,
a `StatisticReader` reads and writes a statistic. `RowLanes.unsort` converts a policy's mask over
the view to storage order. A view covers whole layers, so a large model can be read a few layers at
a time. The number of slots of a lane is known on the CPU; their order and contents stay on the
device, so that reading them does not wait for it.
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
from quire.kernels import device_copies
from quire.kernels.backend import (
    HeldLanes,
    LaneSelector,
    LaneVectors,
    PageScores,
    SelectedSlots,
)
from quire.kernels.coded import CodedPages, CodedPlanes, decode_slots
from quire.kernels.device_copies import to_device, to_device_at_once
from quire.kernels.token_precision import (
    decode_records,
    in_full_precision,
    record_of,
    records_of,
    stored_record,
)
from quire.kv.compaction import followers
from quire.kv.paged_kv import PagedKV
from quire.kv.slot_moves import fill_holes
from quire.kv.statistics import StatisticPages
from quire.kv.tables import LaneTable
from quire.layout.pages import KEY, VALUE, LaneGroup
from quire.layout.statistics import Statistic

PAST_END = 1 << 40
"""Larger than any position."""


def stored_positions(
    kv: PagedKV, group: str, row: int, lanes: slice = slice(None)
) -> NDArray[np.int32]:
    """Return logical positions [lanes, slots] of a row in storage order; a copy.

    Positions past a lane's last slot are undefined, and so are positions in staging pages.
    """
    found: NDArray[np.int32] = (
        _stored_positions(kv, kv.memory.tables[group], np.array([row]), lanes).cpu().numpy()
    )
    return found


def _stored_positions(
    kv: PagedKV, table: LaneTable, rows: NDArray[np.int64], lanes: slice
) -> Int[Tensor, "lane slot"]:
    tokens = table.group.page_class.tokens
    columns = int(table.num_pages[rows, lanes].max(initial=0))
    views = kv.store.views(table.group.page_class)
    if views.positions is None:
        first = table.page_positions[rows, lanes, :columns, None]
        stored = np.add(first, np.arange(tokens), dtype=np.int32)
        num_lanes = first.shape[0] * first.shape[1]
        return to_device(stored.reshape(num_lanes, columns * tokens), kv.store.device)
    pages = np.maximum(table.pages[rows, lanes, :columns], 0).astype(np.int64)
    found = views.positions.index_select(0, to_device(pages.reshape(-1), kv.store.device))
    return found.view(pages.shape[0] * pages.shape[1], columns * tokens)


@dataclass(frozen=True, slots=True)
class SlotOrder:
    """Slots of the table's lanes sorted by position; each tensor is [lanes, slots] on the device.

    Past a lane's last slot, positions are -1 and `slot` lists the remaining slot numbers.

    Attributes:
        positions: int64, ascending.
        slot: int64.
        held: [lanes] slots of each lane; known on the CPU, unlike their order.
    """

    positions: Int[Tensor, "lane slot"]
    slot: Int[Tensor, "lane slot"]
    held: NDArray[np.int64]

    @classmethod
    def of(cls, positions: Int[Tensor, "lane slot"], held: NDArray[np.int64]) -> "SlotOrder":
        """Sort the live slots by position; live slots are the first slots of their lanes.

        Position and slot are packed into one integer. On a CPU `np.sort` of them is faster than
        `np.argsort` and than torch's sorts.
        """
        slots, device = positions.shape[1], positions.device
        bits = slots.bit_length()
        if device_copies.reads_freely(device):
            return cls._on_cpu(positions.numpy(), held, bits)
        slot = torch.arange(slots, device=device)
        live = slot < to_device(held, device)[:, None]
        keys = torch.where(live, positions.long(), PAST_END)
        keys = ((keys << bits) | slot).sort(dim=1).values
        return cls(torch.where(live, keys >> bits, -1), keys & ((1 << bits) - 1), held)

    @classmethod
    def _on_cpu(
        cls, positions: NDArray[np.int32], held: NDArray[np.int64], bits: int
    ) -> "SlotOrder":
        slots = positions.shape[1]
        live = np.arange(slots) < held[:, None]
        past_end = int(positions.max(initial=0, where=live)) + 1  # sorts after every live position
        number: type[np.unsignedinteger[Any]] = (
            np.uint32 if past_end < 1 << 32 - bits else np.uint64
        )
        keys = np.where(live, positions, past_end).astype(number)
        keys <<= number(bits)
        keys |= np.arange(slots, dtype=number)
        keys.sort(axis=1)
        slot = (keys & number((1 << bits) - 1)).astype(np.int64)
        by_position = np.where(live, (keys >> number(bits)).astype(np.int64), -1)
        return cls(torch.from_numpy(by_position), torch.from_numpy(slot), held)

    @property
    def live(self) -> NDArray[np.bool_]:
        """Slots [lanes, slots] that hold a token, in the order of positions and in storage."""
        live: NDArray[np.bool_] = np.arange(self.slot.shape[1]) < self.held[:, None]
        return live


class RowLanes:
    """Lanes of some rows in one lane group, and the order of their slots.

    Args:
        kv: the KV memory.
        group: a lane group.
        rows: a row, or several; their lanes follow one another.
        layers: consecutive indices of layers in the group; None for all.
    """

    def __init__(
        self, kv: PagedKV, group: str, rows: int | Sequence[int], layers: range | None = None
    ) -> None:
        self.kv, self.table = kv, kv.memory.tables[group]
        self.rows: NDArray[np.int64] = np.atleast_1d(np.asarray(rows, dtype=np.int64))
        self.group: LaneGroup = self.table.group
        chosen = range(len(self.group.layers)) if layers is None else layers
        per_layer = self.group.lanes_per_layer
        self.lanes = slice(chosen.start * per_layer, chosen.stop * per_layer)
        self.layers = tuple(self.group.layers[layer] for layer in chosen) * len(self.rows)
        self.held = self.table.num_slots[self.rows, self.lanes].reshape(-1).astype(np.int64)
        self._uploaded: HeldLanes | None = None

    @cached_property
    def order(self) -> SlotOrder:
        """The order of the slots, sorted at the first use."""
        backend, stores_positions = self.kv.backend, self.group.page_class.positions
        if isinstance(backend, LaneSelector) and stores_positions:
            found = backend.order_lanes(self.held_lanes)
            if found is not None:
                return SlotOrder(*found, self.held)
        stored = self._stored_positions[:, : int(self.held.max(initial=0))]
        return SlotOrder.of(stored, self.held)

    @property
    def held_lanes(self) -> HeldLanes:
        """The lanes' slots in pages, for kernels, as of the last `upload`."""
        if self._uploaded is None:
            self.upload([])
        assert self._uploaded is not None
        return self._uploaded

    def upload(self, numbers: Sequence[NDArray[np.integer]]) -> tuple[list[Tensor], list[Tensor]]:
        """Copy numbers of lanes and the page tables of `tables` to the device, all at once."""
        held, tables = self.held, self.tables
        arrays = [
            *(one.astype(np.int32) for one in (held, *numbers)),
            *map(self.short_pages, tables),
        ]
        on_device = to_device_at_once(arrays, self.kv.store.device)
        pages = on_device[-len(tables) :]
        positions = self.kv.store.views(self.group.page_class).positions
        assert positions is not None, "unordered lanes store positions"
        self._uploaded = HeldLanes(positions, pages[0], on_device[0], int(held.max(initial=0)))
        return on_device[1 : -len(tables)], pages

    @cached_property
    def tables(self) -> list[LaneTable]:
        """The table of the lanes, and those of numbers of their slots that the rows use."""
        return [self.table, *followers(self.kv.memory, self.group.name, int(self.rows[0]))]

    def of_heads(self, numbers: NDArray[np.int64]) -> Int[Tensor, " lane"]:
        """Numbers of the table's lanes for the lanes of a view."""
        return self.tensor(np.repeat(numbers, self.group.page_class.heads))

    def short_pages(self, table: LaneTable) -> NDArray[np.int32]:
        """The lanes' part [lanes, columns] of a table, as far as it has pages."""
        columns = max(1, -(-int(self.held.max(initial=0)) // table.group.page_class.tokens))
        found: NDArray[np.int32] = table.pages[self.rows, self.lanes, :columns]
        return found.reshape(len(self.held), found.shape[2])

    @property
    def row(self) -> int:
        """The only row."""
        [row] = self.rows.tolist()
        return int(row)

    @property
    def heads_per_layer(self) -> int:
        return self.group.lanes_per_layer * self.group.page_class.heads

    @property
    def readers(self) -> int:
        """Number of layers that read each of the lanes."""
        return self.group.readers

    @property
    def _stored_positions(self) -> Int[Tensor, "lane slot"]:
        return _stored_positions(self.kv, self.table, self.rows, self.lanes)

    @property
    def stored_positions(self) -> NDArray[np.int32]:
        """Positions [lanes, slots] in storage order; undefined past a lane's last slot."""
        found: NDArray[np.int32] = self._stored_positions.cpu().numpy()
        return found

    @property
    def lane_positions(self) -> NDArray[np.int32]:
        """Logical positions for each lane of the table, [lanes, slots]; a copy."""
        found: NDArray[np.int32] = self.order.positions.cpu().numpy().astype(np.int32)
        return found

    @cached_property
    def positions(self) -> Int[Tensor, "lane slot"]:
        """Logical positions, ascending; -1 past a lane's last slot. A lane is a KV head."""
        return self.order.positions.repeat_interleave(self.group.page_class.heads, dim=0)

    def in_storage_order(
        self, vectors: Float[Tensor, "lane slot width"]
    ) -> Float[Tensor, "table_lane head slot width"]:
        by_lane = vectors.view(-1, self.group.page_class.heads, *vectors.shape[1:])
        slot = self.order.slot[:, None, :, None].expand_as(by_lane)
        return torch.empty_like(by_lane).scatter_(2, slot, by_lane)

    def by_table_lane(
        self, marks: Bool[Tensor, "lane slot"]
    ) -> Bool[Tensor, "table_lane head slot"]:
        """Group the heads that share a lane of the table."""
        heads = self.group.page_class.heads
        return marks.view(len(marks) // heads, heads, marks.shape[1])

    def by_slot(self, keep: Bool[Tensor, "table_lane slot"]) -> Bool[Tensor, "table_lane slot"]:
        """Convert marks by position to marks in storage order."""
        return torch.empty_like(keep).scatter_(1, self.order.slot, keep)

    def unsort(self, keep: Bool[Tensor, "lane slot"]) -> NDArray[np.bool_]:
        """Convert a mask over the view to [lanes of the table, slots] in storage order.

        Raises:
            PolicyError: KV heads that share pages retain different tokens.
        """
        by_lane = self.by_table_lane(keep.to(self.order.slot.device))
        if (by_lane != by_lane[:, :1]).any():
            raise PolicyError(self.heads_differ)
        stored: NDArray[np.bool_] = self.by_slot(by_lane[:, 0] & self.live).cpu().numpy()
        return stored

    @property
    def heads_differ(self) -> str:
        """The error of a rule that retains different tokens in heads that share pages."""
        return (
            f"heads of group {self.group.name!r} share pages and must retain the same tokens, "
            "but the policy retains different tokens per head; it needs one-head pages"
        )

    def pages(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        """The lanes' part [lanes, capacity] of a table's pages; page 0 for entries without one."""
        of_rows = pages[self.rows, self.lanes]
        num_lanes = of_rows.shape[0] * of_rows.shape[1]
        return np.maximum(of_rows, 0).reshape(num_lanes, of_rows.shape[2]).astype(np.int64)

    def places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the slots by position, each [lane, slot]."""
        slot = self.order.slot
        return self.tensor(self.pages(self.table.pages)).gather(1, slot // tokens), slot % tokens

    def mark_pages(
        self, marks: NDArray[np.bool_], lane: NDArray[np.int64], slot: NDArray[np.int64]
    ) -> None:
        """Mark the pages [rows, lanes of the table, columns] of slots in these lanes."""
        row, lane = np.divmod(lane, len(self.order.held) // len(self.rows))
        marks[row, self.lanes.start + lane, slot // self.group.page_class.tokens] = True

    @cached_property
    def live(self) -> Bool[Tensor, "lane slot"]:
        """`order.live` on the device."""
        return self.tensor(self.order.live)

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

    def read(self) -> Float[Tensor, "lane slot width"]:
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
        if not lanes.order.live.all():  # free slots may hold anything
            found.masked_fill_(~lanes.live[:, :, None, None], 0.0)
        return found.transpose(1, 2).flatten(0, 1)

    def lost(
        self, lane: NDArray[np.int64], index: NDArray[np.int64]
    ) -> Float[Tensor, "token head width"]:
        """Return what the codes of tokens of the full-precision window lost.

        Args:
            lane: [token] lane, counted from the first of the lanes.
            index: [token] index of the token in the order of positions.
        """
        lanes, exact = self._lanes, self._exact
        assert exact is not None, "the group keeps full-precision tokens"
        at, tokens = (lanes.tensor(lane), lanes.tensor(index)), lanes.group.page_class.tokens
        pages = lanes.tensor(lanes.pages(exact.table.pages)[:, 0])[at[0]]
        record = record_of(exact.tokens, lanes.order.positions[at])
        decoded = self._decoded(*lanes.places(tokens))[at]
        residual = exact.views.planes[self._plane][0][pages, :, record].float() - decoded
        assert self._views.coded is not None, "the pages hold codes"
        if self._side(self._views.coded).codec.spec.per_page:  # the last page is not encoded yet
            coded_slots = lanes.tensor(lanes.order.held[lane] // tokens * tokens)
            residual[lanes.order.slot[at] >= coded_slots] = 0
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
        first = torch.arange(num_lanes, device=plane.device)[:, None] * (columns * tokens)
        found = vectors.index_select(0, (first + lanes.order.slot).reshape(-1))
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
        record = records_of(promoted.marks[pages], lanes.order.positions)
        lane, slot = ((record >= 0) & lanes.live).nonzero(as_tuple=True)
        residual = decode_records(self._side(promoted.coded), pages[lane], record[lane, slot])
        found[lane, slot] += residual

    def _write_full_precision(self, found: Tensor) -> None:
        """Overwrite tokens that the newest query reads in full precision."""
        lanes, exact, order = self._lanes, self._exact, self._lanes.order
        assert exact is not None, "the group keeps full-precision tokens"
        positions, slots = order.positions, order.slot
        held = lanes.tensor(order.held[:, None])
        lengths = np.repeat(lanes.kv.memory.lengths[lanes.rows], len(held) // len(lanes.rows))
        newest = lanes.tensor(lengths[:, None]) - 1
        wanted = in_full_precision(exact.tokens, positions, slots, newest, held - 1)
        if self._whole_window:
            wanted |= positions > newest - exact.tokens.recent
        lane, slot = (wanted & lanes.live).nonzero(as_tuple=True)
        pages = lanes.tensor(lanes.pages(exact.table.pages)[:, 0])[lane]
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
        order = lanes.order.slot[:, None].expand(-1, heads, -1)
        found = by_head.gather(2, order)
        if not lanes.order.live.all():  # free slots may hold anything
            found.masked_fill_(~lanes.live[:, None], 0.0)
        if self._place.is_apart and self._place.readers > 1:  # numbers of a layer are neighbours
            by_reader = (num_lanes, self._place.readers, lanes.group.page_class.heads, -1, slots)
            found = found.reshape(by_reader).transpose(1, 2)
        return found.reshape(-1, slots)


Moves = tuple[Int[Tensor, " move"], Int[Tensor, " move"], Int[Tensor, " move"]]
"""Lane, source slot and target slot of each move."""


class LaneReader(RowLanes):
    """Lanes with readers of their planes: what a policy's view of rows reads."""

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        key = VectorReader(self, KEY).read()
        return torch.cat([self.values(), key], dim=2) if self.group.page_class.joined else key

    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        return VectorReader(self, VALUE).read()

    def in_pages(self, plane: str) -> PageScores | None:
        """Scores from the pages of keys or values; None if the backend does not read them."""
        scoring, order = self.kv.scoring(self.group, plane), self.order
        if scoring is None:
            return None
        view = self.kv.store.views(self.group.page_class).planes[plane][0]
        columns, device = -(-order.slot.shape[1] // view.shape[2]), view.device
        pages = self.table.pages[self.rows, self.lanes, :columns].reshape(len(order.held), columns)
        lanes = LaneVectors(
            plane=view,
            coded=self.kv.coded_plane(self.group, plane),
            pages=to_device(pages, device),
            order=order.slot,
            positions=order.positions,
            held=to_device(order.held, device),
        )
        return PageScores(scoring, lanes)

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """The attention statistics that the row uses, by the name of the statistic."""
        return {
            place.statistic.name: StatisticReader(self, place).read()
            for place in self._statistics
            if place.table.active[self.rows].all()
        }

    @property
    def _statistics(self) -> Sequence[StatisticPages]:
        return self.kv.statistics.get(self.group.name, ())

    def numbers_of(self, statistic: Statistic) -> StatisticPages | None:
        """The pages of a statistic of single slots that the rows use, one number for each slot."""
        for place in self._statistics:
            is_used = place.statistic == statistic and place.table in self.tables
            if is_used and place.numbers.shape[1] == place.numbers.shape[3] == 1:
                return place
        return None

    def move(self, moves: Moves) -> None:
        """Move slots, and their statistics, within their lanes."""
        lane, source, target = moves
        for table in self.tables:
            page_class = table.group.page_class
            pages = self.tensor(self.pages(table.pages))
            places = [
                (pages[lane, slot // page_class.tokens], slot % page_class.tokens)
                for slot in (source, target)
            ]
            self.kv.store.move_places(page_class, places[0], places[1])

    def move_selected(self, selected: SelectedSlots, pages: Sequence[Tensor]) -> None:
        """Move slots, and their statistics, in the pages of `tables`, one call for each class."""
        backend, store = self.kv.backend, self.kv.store
        assert isinstance(backend, LaneSelector), "it selected the slots"
        for table, own in zip(self.tables, pages, strict=True):
            planes = store.views(table.group.page_class).by_slot
            backend.move_lanes(planes, own, selected)


def slot_moves(
    keep: Bool[Tensor, "lane slot"], keep_slots: NDArray[np.int64], held: NDArray[np.int64]
) -> Moves:
    """Return lane, source and target of the moves that fill the holes before `keep_slots`.

    On a CPU these are the moves of `fill_holes`. Elsewhere their number is not known: each lane has
    as many as it can need, and repeats its first move, or moves slot 0 onto itself.

    Args:
        keep: [lane, slot] retained slots in storage order.
        keep_slots: [lane] number of retained slots.
        held: [lane] number of slots.
    """
    if device_copies.reads_freely(keep.device):
        moves = fill_holes(keep.numpy())
        found = (moves.lane, moves.source, moves.target)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1]), torch.from_numpy(found[2])
    lanes, device = len(keep), keep.device
    width = int(np.minimum(keep_slots, held - keep_slots).max(initial=0))
    slot = torch.arange(keep.shape[1], device=device)
    before = slot < to_device(keep_slots, device)[:, None]

    def listed(marks: Tensor) -> Tensor:
        """The slots of marks, ascending; zeros after the last one."""
        place = torch.where(marks, marks.cumsum(dim=1) - 1, width).clamp_max(width)
        found = torch.zeros(lanes, width + 1, dtype=torch.int64, device=device)
        return found.scatter_(1, place, slot.expand_as(place))[:, :width]

    holes = before & ~keep
    used = torch.arange(width, device=device) < holes.sum(dim=1, keepdim=True)
    lane = torch.arange(lanes, device=device).repeat_interleave(width)
    source, target = (
        torch.where(used, slots, slots[:, :1]).reshape(-1)
        for slots in (listed(~before & keep), listed(holes))
    )
    return lane, source, target


class JoinedReader:
    """Readers of different layers of one row, for rules that divide a cap over all layers."""

    def __init__(self, readers: Sequence[LaneReader]) -> None:
        self._readers, self.group = readers, readers[0].group
        self.heads_per_layer = readers[0].heads_per_layer
        self.layers = tuple(layer for reader in readers for layer in reader.layers)

    @property
    def positions(self) -> Int[Tensor, "lane slot"]:
        """Logical positions, ascending; a lane is a KV head."""
        return _joined([reader.positions for reader in self._readers], -1)

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """Attention statistics by name, [lane, ...], of those whose sizes all layers share."""
        found = [reader.statistics for reader in self._readers]
        lanes = [len(reader.positions) for reader in self._readers]
        joined = {}
        for name in found[0]:
            parts = [of[name] for of in found]
            sizes = {(len(part) // n, part.shape[2:]) for part, n in zip(parts, lanes, strict=True)}
            if len(sizes) == 1:
                joined[name] = _joined(parts)
        return joined

    @property
    def readers(self) -> int | Int[Tensor, "lane 1"]:
        """Number of layers that read each lane; one number, or one per lane."""
        if len({reader.readers for reader in self._readers}) == 1:
            return self._readers[0].readers
        of = [
            reader.positions.new_full((len(reader.positions), 1), reader.readers)
            for reader in self._readers
        ]
        return torch.cat(of)

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return _joined([reader.keys() for reader in self._readers])

    def values(self) -> Float[Tensor, "lane slot value_dim"]:
        return _joined([reader.values() for reader in self._readers])


def _joined(parts: Sequence[Tensor], filler: int = 0) -> Tensor:
    """Concatenate [lane, slot, ...] tensors, filled up to the longest lanes."""
    longest = max(part.shape[1] for part in parts)
    filled = []
    for part in parts:
        shape = (part.shape[0], longest - part.shape[1], *part.shape[2:])
        filled.append(torch.cat([part, part.new_full(shape, filler)], dim=1))
    return torch.cat(filled)
