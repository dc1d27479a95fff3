"""Encodes pages of shared scales again when an eviction moves their slots.

A codec of whole pages stores a scale per channel for the tokens of a page. After an eviction a page
holds other tokens, and is encoded again:

    full pages, no slot replaced   unchanged
    full pages, slots replaced     encoded again; a channel keeps its scale if the new tokens fit
    full pages moved as a whole    copied with their scales
    the last page, not full        its tokens become relocated records in full precision, as written
                                   to it; it is encoded when it is full

Tokens that are still in the full-precision window are encoded from there, other tokens from their
decoded numbers. A row needs these copies for a few layers at a time.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kv.compaction import CompactionPlan
from quire.kv.lane_reader import RowLanes, VectorReader
from quire.kv.paged_kv import PagedKV
from quire.kv.tables import LaneTable
from quire.layout.pages import KEY, VALUE, LaneGroup

FLOAT_BYTES = 4
COPIES = 2  # of keys and values, in the order of positions and in that of slots


@dataclass(frozen=True, slots=True)
class _Part:
    """The lanes of some layers in a compaction."""

    group: LaneGroup
    lanes: slice
    pages: NDArray[np.int32]  # [lanes, capacity] page numbers
    kept: NDArray[np.int64]  # [lanes] slots after the compaction
    is_changed: NDArray[np.bool_]  # [lanes] whether a lane loses slots
    lane: NDArray[np.int64]  # slot moves; counted from the first of the part
    source: NDArray[np.int64]
    target: NDArray[np.int64]

    @classmethod
    def of(cls, table: LaneTable, plan: CompactionPlan, layers: range) -> "_Part":
        per_layer = table.group.lanes_per_layer
        lanes = slice(layers.start * per_layer, layers.stop * per_layer)
        mine = (plan.moves.lane >= lanes.start) & (plan.moves.lane < lanes.stop)
        return cls(
            group=table.group,
            lanes=lanes,
            pages=table.pages[plan.row, lanes],
            kept=plan.keep_slots[lanes].astype(np.int64),
            is_changed=plan.keep_slots[lanes] < plan.held_slots[lanes],
            lane=plan.moves.lane[mine] - lanes.start,
            source=plan.moves.source[mine],
            target=plan.moves.target[mine],
        )


@dataclass(frozen=True, slots=True)
class _Moved:
    """The retained tokens of a part, in their new slots."""

    key: Float[Tensor, "lane head slot head_dim"]  # float32, as value
    value: Float[Tensor, "lane head slot value_dim"]
    source: NDArray[np.int64]  # [lane, slot] slots before
    positions: NDArray[np.int32]  # [lane, slot]


@dataclass(frozen=True, slots=True)
class _Changed:
    """Full pages with other tokens than before."""

    lane: NDArray[np.int64]  # [page] lane of the part
    column: NDArray[np.int64]  # [page] of the page table
    source: NDArray[np.int64]  # [page, token] slots of the tokens before

    @classmethod
    def of(cls, part: _Part, source: NDArray[np.int64]) -> "_Changed":
        tokens = part.group.page_class.tokens
        replaced = np.zeros((len(part.kept), source.shape[1] // tokens + 1), dtype=np.bool_)
        replaced[part.lane, part.target // tokens] = True
        replaced &= np.arange(replaced.shape[1]) < (part.kept // tokens)[:, None]
        lane, column = np.nonzero(replaced)
        slot = column[:, None] * tokens + np.arange(tokens)
        return cls(lane, column, source[lane[:, None], slot])

    @property
    def slot(self) -> NDArray[np.int64]:
        """The slots of the pages, [page, token]."""
        tokens = self.source.shape[1]
        slots: NDArray[np.int64] = self.column[:, None] * tokens + np.arange(tokens)
        return slots

    @property
    def keeps(self) -> NDArray[np.bool_]:
        """Whether some tokens stay in their slots, [page]."""
        stay: NDArray[np.bool_] = (self.source == self.slot).any(axis=1)
        return stay

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """Whether the tokens are those of another page, in the same order, [page]."""
        same: NDArray[np.bool_] = (np.diff(self.source, axis=1) == 1).all(axis=1)
        whole: NDArray[np.bool_] = same & (self.source[:, 0] % self.source.shape[1] == 0)
        return whole

    def where(self, chosen: NDArray[np.bool_]) -> "_Changed":
        return _Changed(self.lane[chosen], self.column[chosen], self.source[chosen])


class Resealing:
    """Moves slots of pages that a codec encodes as a whole, and encodes these pages again."""

    def __init__(self, kv: PagedKV, group: str, scratch_bytes: int) -> None:
        self._kv, self._scratch_bytes = kv, scratch_bytes
        views = kv.store.views(kv.memory.tables[group].group.page_class)
        assert views.coded is not None, "pages that are encoded as a whole hold codes"
        self._coded, self._buffer = views.coded, kv.full_precision[group]
        self._promoted = kv.promoted.get(group)
        self.num_encoded = 0

    def move(self, table: LaneTable, plan: CompactionPlan) -> None:
        group = table.group
        page_tokens = group.page_class.tokens
        for layers in self._parts(group, int(plan.held_slots.max(initial=0))):
            part = _Part.of(table, plan, layers)
            if not part.is_changed.any():
                continue
            moved = self._moved(plan, part, layers)
            changed = _Changed.of(part, moved.source)
            whole = changed.where(changed.is_whole)
            from_pages = self._tensor(part.pages[whole.lane, whole.source[:, 0] // page_tokens])
            shared = [(plane, plane[from_pages]) for plane in self._shared_planes]
            self._kv.store.move_records(
                group.page_class,
                (part.pages[part.lane, part.source // page_tokens], part.source % page_tokens),
                (part.pages[part.lane, part.target // page_tokens], part.target % page_tokens),
            )
            for plane, records in shared:
                plane[self._tensor(part.pages[whole.lane, whole.column])] = records
            self._encode_full_pages(plan.row, part, moved, changed.where(~changed.is_whole))
            self._store_open_page(plan.row, part, moved)

    @property
    def _shared_planes(self) -> list[Tensor]:
        sides = (self._coded.key, self._coded.value)
        return [
            plane
            for side in sides
            for plane, spec in zip(
                side.planes, side.codec.spec.planes(side.codec.head_dim), strict=True
            )
            if spec.per_page
        ]

    def _parts(self, group: LaneGroup, slots: int) -> list[range]:
        page_class = group.page_class
        width = page_class.head_dim + page_class.value_dim
        numbers = COPIES * slots * page_class.heads * group.lanes_per_layer * width
        together = max(1, self._scratch_bytes // max(1, FLOAT_BYTES * numbers))
        layers = len(group.layers)
        return [range(at, min(at + together, layers)) for at in range(0, layers, together)]

    def _moved(self, plan: CompactionPlan, part: _Part, layers: range) -> _Moved:
        """Read the retained slots, in their new order."""
        lanes = RowLanes(self._kv, plan.group, plan.row, layers)
        source = np.arange(int(part.kept.max(initial=0)))[None].repeat(len(part.kept), axis=0)
        source[part.lane, part.target] = part.source
        slot = torch.from_numpy(source).to(self._kv.store.device)
        sides = [
            lanes.in_storage_order(VectorReader(lanes, plane, whole_window=True).read())
            for plane in (KEY, VALUE)
        ]
        key, value = (
            x.gather(2, slot[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
            for x in sides
        )
        positions = np.take_along_axis(lanes.stored_positions, source, axis=1)
        return _Moved(key, value, source, positions)

    def _encode_full_pages(self, row: int, part: _Part, moved: _Moved, changed: _Changed) -> None:
        lane = changed.lane
        if not len(lane):
            return
        pages, slot = self._tensor(part.pages[lane, changed.column]), self._tensor(changed.slot)
        keeps = self._tensor(changed.keeps) > 0
        self.num_encoded += len(lane)
        positions = self._tensor(moved.positions[lane[:, None], changed.slot])
        for number, vectors in enumerate((moved.key, moved.value)):
            side = (self._coded.key, self._coded.value)[number]
            if side.codec.spec.per_page:
                found = vectors[self._tensor(lane)[:, None], :, slot].transpose(1, 2)
                # encode pages with their new tokens
                before = [plane[pages] for plane in side.planes]
                heads = keeps[:, None].expand(-1, found.shape[1])
                encoded = side.codec.encode_again(found, before, heads)
                for plane, codes in zip(side.planes, encoded, strict=True):
                    plane[pages] = codes
                lost = found - side.codec.decode(encoded)
                self._encode_records(row, part, lane, number, positions, lost)

    def _encode_records(
        self,
        row: int,
        part: _Part,
        lane: NDArray[np.int64],
        side: int,
        positions: Tensor,
        lost: Tensor,
    ) -> None:
        """Encode what the new codes lost, for promoted tokens of the encoded pages."""
        if self._promoted is not None:
            pages = self._promoted.table.pages[row, part.lanes, 0][lane]
            coded = (self._promoted.coded.key, self._promoted.coded.value)[side]
            self._promoted.encode_again(coded, self._tensor(pages), positions, lost)

    def _store_open_page(self, row: int, part: _Part, moved: _Moved) -> None:
        """Store the tokens of the last page in full precision, if it is not full."""
        buffer = self._buffer
        tokens, marks = buffer.tokens, buffer.views.positions
        assert marks is not None, "lanes whose slots move have records for relocated tokens"
        lanes = np.flatnonzero(part.is_changed)
        open_slots = part.kept[lanes] % tokens.page_tokens
        pages = self._tensor(buffer.table.pages[row, part.lanes, 0][lanes])
        records = slice(tokens.first_relocated, tokens.records)
        marks[pages, records] = 0
        offset = np.arange(tokens.page_tokens)
        nth, offset = np.nonzero(offset < open_slots[:, None])
        lane = lanes[nth]
        slot = part.kept[lane] // tokens.page_tokens * tokens.page_tokens + offset
        at = self._tensor(buffer.table.pages[row, part.lanes, 0][lane])
        record = self._tensor(tokens.first_relocated + offset)
        marks[at, record] = self._tensor(moved.positions[lane, slot] + 1).to(marks.dtype)
        for plane, vectors in ((buffer.views.key, moved.key), (buffer.views.value, moved.value)):
            found = vectors[self._tensor(lane), :, self._tensor(slot)]
            plane[at, :, record] = found.to(plane.dtype)

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(
            self._kv.store.device
        )
