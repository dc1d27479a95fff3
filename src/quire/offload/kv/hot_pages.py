"""Sparse attention over offloaded pages: only the pages that a decode row reads are fetched.

    bounds of all offloaded pages (on the device) --> the pages of each KV head to read
        in the cache: read there | not in the cache: their keys and values of this head are fetched

    staging slot 0 | layers that read all pages, one after the other             |
    staging slot 1 | layer 2: its pages | layer 3: its pages | ... | the rest    |

The cache is staging slot 1, which no layer needs as a whole then: it takes no further memory. Its
pages are divided over the layers. Each layer replaces the pages that it has not read for the
longest time. Layers follow each other, so one order for all would drop the pages of a layer just
before it reads them again. What a layer reads beyond its own pages goes to the rest, until the next
layer.

KV heads read different pages. A page of the cache holds another page of the prefix in each head,
and only the head's part of a page is fetched.

Rows that share offloaded pages share their cache, beside that of the pages of each row alone. A
step in which one of them reads all pages, or in which their budgets exceed the cache, loads whole
layers as without sparse attention, and the cache starts anew.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import LayerPages
from quire.kv.pages import PageNumbers
from quire.kv.store import PageStore
from quire.kv.tables import LaneTable
from quire.layout.layout import can_be_offloaded, classes_with_bounds
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from quire.layout.sparse import SparseSpec
from quire.offload.kv.offloaded_prefixes import OffloadedPageGroup
from quire.offload.swap.host_pool import HostCopies, page_starts
from quire.offload.swap.host_store import DirectCopies
from quire.offload.swap.transfer import TransferWorker

_GROWTH = 16  # a cache has room for a budget that is 1 / _GROWTH larger


class OffloadedBounds:
    """The bounds of the keys of all pages in offload memory, on the device.

    They have the index of the page if offload memory were full of pages of its class. So they
    belong to the bytes of the page, for all sequences and cached prefixes that refer to them.

    Args:
        store: the KV memory.
        layout: its lane groups.
        pool_bytes: size of offload memory.
    """

    def __init__(self, store: PageStore, layout: CacheLayout, pool_bytes: int) -> None:
        self._store = store
        self.tables: dict[PageClass, Tensor] = {}
        for page_class in classes_with_bounds(layout):
            view = store.views(page_class).bounds
            assert view is not None, "of such classes"
            pages = pool_bytes // page_class.page_bytes + 1
            self.tables[page_class] = torch.zeros(
                pages, *view.shape[1:], dtype=view.dtype, device=store.device
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the table."""
        return sum(table.nbytes for table in self.tables.values())

    def save(self, page_class: PageClass, pages: PageNumbers, starts: NDArray[np.int64]) -> None:
        """Copy the bounds of pages of the KV memory that were saved from these bytes on."""
        if page_class in self.tables:
            view = self._store.views(page_class).bounds
            assert view is not None, "of such classes"
            index = torch.from_numpy(starts // page_class.page_bytes)
            self.tables[page_class][index] = view[torch.from_numpy(pages.astype(np.int64))]

    def read(
        self, page_class: PageClass, starts: NDArray[np.int64]
    ) -> Float[Tensor, "page head 1 both_dims"]:
        """Return the bounds of the pages whose bytes start here."""
        return self.tables[page_class][torch.from_numpy(starts // page_class.page_bytes)]

    def addresses(self, page_class: PageClass, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the bounds of the pages are whose bytes start here."""
        table = self.tables[page_class]
        step = table.stride(0) * table.itemsize
        return table.data_ptr() + starts // page_class.page_bytes * step


def with_dense_layers(layout: CacheLayout, spec: SparseSpec) -> CacheLayout:
    """Return a layout that stages the layers which read all pages in one slot."""

    def staged(group: LaneGroup) -> LaneGroup:
        dense = whole_layers(group, spec)
        if not can_be_offloaded(group) or not group.page_class.has_bounds:
            return group
        return replace(group, dense_layers=dense) if dense < len(group.layers) else group

    return replace(layout, groups=tuple(map(staged, layout.groups)))


class HotPages:
    """The cache of neighbouring offloaded pages of a lane group that the same rows hold.

    Args:
        table: page table of the group.
        page_groups: the pages, in a staging with two slots.
        first: first layer that does not read all pages.
        max_pages: most pages that a KV head of a layer reads, in all rows.

    Attributes:
        page_groups, first: see above.
        columns: pages of a lane.
        max_pages: most pages that a KV head of a layer can read.
        starts: [layers, lanes of a layer, columns] first byte of each page in offload memory.
    """

    def __init__(
        self,
        table: LaneTable,
        page_groups: Sequence[OffloadedPageGroup],
        first: int,
        max_pages: int,
    ) -> None:
        group, self.page_groups, self.first = table.group, tuple(page_groups), first
        lanes, heads, num_layers = group.lanes_per_layer, group.page_class.heads, len(group.layers)
        parts = []
        for held in page_groups:
            spaces = [page_starts(space, group.page_class) for space in held.host.layers]
            by_layer = np.stack(spaces).reshape(num_layers, lanes, held.host.columns)
            parts.append(by_layer[:, :, held.offset : held.offset + held.columns])
        self.starts: NDArray[np.int64] = np.concatenate(parts, axis=2)
        self._pages = np.concatenate([held.staging[1] for held in page_groups], axis=1)
        self.columns, layers = self._pages.shape[1], num_layers - first
        own = self.columns // layers
        wanted = min(self.columns, max_pages + max_pages // _GROWTH + 1)
        if own < wanted and layers > 1:
            own = (self.columns - wanted) // (layers - 1)
        self._own, self._rest = own, layers * own
        self.max_pages = own + self.columns - self._rest
        # by layer after `first` and KV head: the place of each column, the column in each place;
        # places from `own` on are in the rest
        shape = layers, lanes * heads
        self._place = np.full((*shape, self.columns), -1, dtype=np.int32)
        self._column = np.full((*shape, own), -1, dtype=np.int32)
        self._used = np.zeros((*shape, own), dtype=np.int64)
        self._heads, self._clock = heads, 0
        self._in_rest = np.zeros(lanes * heads, dtype=np.int64)
        self._layer = first  # whose pages are in the rest

    def fits(self, page_groups: Sequence[OffloadedPageGroup], first: int, max_pages: int) -> bool:
        """Whether it serves a step of the same pages with such reads."""
        same = len(page_groups) == len(self.page_groups) and all(
            map(is_, page_groups, self.page_groups)
        )
        return same and first == self.first and max_pages <= self.max_pages

    def begin(self, layer: int) -> None:
        """Begin the reads of a layer of all rows: they need its pages until the next call."""
        of_layer = self._place[self._layer - self.first]
        of_layer[of_layer >= self._own] = -1
        self._in_rest[:] = 0
        self._layer = layer
        self._clock += 1

    def find(self, lane: int, columns: NDArray[np.int64]) -> "Found":
        """Return the pages of columns that KV heads of a row read in the layer of `begin`.

        Columns that are not in the cache get a place.

        Args:
            lane: index of the lane in its layer.
            columns: [head, count] columns; others than those of the cache have page 0.
        """
        at, kv_heads = self._layer - self.first, lane * self._heads + np.arange(self._heads)
        place_of, column_in, used = self._place[at], self._column[at], self._used[at]
        is_held = (columns >= 0) & (columns < self.columns)
        place = place_of[kv_heads[:, None], np.where(is_held, columns, 0)]
        is_hit, missing = is_held & (place >= 0), is_held & (place < 0)
        head, order = np.nonzero(is_hit & (place < self._own))
        used[kv_heads[head], place[head, order]] = self._clock
        oldest = np.argsort(used[kv_heads], axis=1, kind="stable")
        number = np.cumsum(missing, axis=1) - 1
        free = (used[kv_heads] < self._clock).sum(axis=1, keepdims=True)
        head, order = np.nonzero(missing & (number < free))
        taken, kv_head = oldest[head, number[head, order]], kv_heads[head]
        before = column_in[kv_head, taken]
        place_of[kv_head[before >= 0], before[before >= 0]] = -1
        column_in[kv_head, taken], used[kv_head, taken] = columns[head, order], self._clock
        place[head, order] = taken
        spilled = missing & (number >= free)
        begin = self._own + self._in_rest[kv_heads, None]
        place = np.where(spilled, begin + number - free, place)
        self._in_rest[kv_heads] += spilled.sum(axis=1)
        head, order = np.nonzero(missing)
        place_of[kv_heads[head], columns[head, order]] = place[head, order]
        index = np.where(place < self._own, at * self._own, self._rest - self._own) + place
        pages = np.where(is_held, self._pages[lane][np.where(is_held, index, 0)], 0)
        starts = self.starts[self._layer, lane, columns[head, order]]
        return Found(pages, int(is_hit.sum()), pages[head, order], head, starts)


class HotRow:
    """The caches of the offloaded prefix of a row in one lane group.

    Args:
        parts: caches of its pages, in order.

    Attributes:
        parts: see above.
        first: first layer that does not read all pages.
        starts: [layers, lanes of a layer, columns] first byte of each page in offload memory.
    """

    def __init__(self, parts: Sequence[HotPages]) -> None:
        self.parts, self.first = tuple(parts), parts[0].first
        self.starts = np.concatenate([part.starts for part in parts], axis=2)

    def find(
        self, lane: int, columns: NDArray[np.int64], resident: PageNumbers
    ) -> tuple[PageNumbers, list["Found"]]:
        """Return the pages of columns, and what each cache found; see `HotPages.find`.

        Args:
            lane: index of the lane in its layer.
            columns: [head, count] columns of the page table.
            resident: page table of the lane.
        """
        begin, found = 0, list[Found]()
        for part in self.parts:
            found.append(part.find(lane, columns - begin))
            begin += part.columns
        pages = np.where(columns < begin, sum(one.pages for one in found), resident[columns])
        return pages, found


@dataclass(frozen=True, slots=True)
class Found:
    """Where KV heads read pages of a cache.

    Attributes:
        pages: [head, count] pages of the KV memory; 0: of a column that the cache does not have.
        num_hits: those of them that were in the cache.
        missing, heads, starts: the others of offload memory: their page in the KV memory, KV head
            in the page, and first byte in offload memory.
    """

    pages: PageNumbers
    num_hits: int
    missing: PageNumbers
    heads: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(slots=True)
class HotReads:
    """Pages of KV heads that sparse attention has read from offload memory.

    Attributes:
        fetched: those that were fetched.
        hits: those that were in the cache.
    """

    fetched: int = 0
    hits: int = 0


def whole_layers(group: LaneGroup, spec: SparseSpec) -> int:
    """First layers of a group that a row reads as a whole."""
    return bisect_left(group.layers, spec.dense_layers)


def pages_read(table: LaneTable, row: int, spec: SparseSpec) -> int:
    """Most pages that a KV head of a row reads in a layer; 0: a layer reads all, or no layer less.

    Rows whose cache would be used by layers that read all pages count as such.
    """
    group, tokens = table.group, table.group.page_class.tokens
    first = whole_layers(group, spec)
    if first == len(group.layers) or first > max(1, group.dense_layers):
        return 0
    held = -(-table.num_slots[row, first * group.lanes_per_layer :] // tokens)
    counts = [spec.pages_read(int(pages)) for pages in np.unique(held)]
    return max(counts) if all(counts) else 0


@dataclass(slots=True)
class HotLayer:
    """The offloaded pages of a layer in a step; implements `OffloadedPages`.

    Attributes:
        table: page table of the lane group.
        index: index of the layer in its group.
        rows: rows of the page table, in the order of the step.
        caches: of rows, by index in the step.
        bounds_table: bounds of offloaded pages.
        copies: copies pages from offload memory.
        worker: runs the copies.
        reads: counters.
    """

    table: LaneTable
    index: int
    rows: NDArray[np.int64]
    caches: Mapping[int, HotRow]
    bounds_table: OffloadedBounds
    copies: HostCopies
    worker: TransferWorker
    reads: HotReads = field(default_factory=HotReads)

    def bounds(
        self, pages: LayerPages, row: int, lane: int, columns: int
    ) -> Float[Tensor, "column head 1 both_dims"]:
        assert pages.bounds is not None, "only such pages are selected"
        numbers = self._numbers(lane)[row, :columns]
        found = pages.bounds[torch.from_numpy(numbers.astype(np.int64))]
        if row in self.caches:
            starts = self.caches[row].starts[self.index, lane]
            found[: len(starts)] = self.bounds_table.read(self.table.group.page_class, starts)
        return found

    def addresses(self, pages: LayerPages, columns: int) -> NDArray[np.int64]:
        page_class, lanes = self.table.group.page_class, self.table.group.lanes_per_layer
        assert pages.bounds is not None, "only such pages are selected"
        first = pages.bounds.data_ptr()
        found = np.zeros((len(self.rows), lanes, columns), dtype=np.int64)
        for lane in range(lanes):
            numbers = self._numbers(lane)[:, :columns]
            found[:, lane, : numbers.shape[1]] = first + numbers * np.int64(page_class.page_bytes)
        for row, cache in self.caches.items():
            own = self.bounds_table.addresses(page_class, cache.starts[self.index])
            found[row, :, : own.shape[1]] = own
        return found

    def fetch(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], counts: NDArray[np.int32]
    ) -> PageNumbers:
        group, pages = self.table.group, np.zeros(columns.shape, dtype=np.int32)
        heads, found = group.page_class.heads, list[Found]()
        for part in {part: None for cache in self.caches.values() for part in cache.parts}:
            part.begin(self.index)
        for lane in range(group.lanes_per_layer):
            own, numbers = slice(lane * heads, (lane + 1) * heads), self._numbers(lane)
            for at, row in enumerate(rows.tolist()):
                wanted = columns[at, own, : counts[at, lane]]
                if row not in self.caches:
                    pages[at, own, : counts[at, lane]] = numbers[row][wanted]
                    continue
                where, parts = self.caches[row].find(lane, wanted, numbers[row])
                pages[at, own, : counts[at, lane]] = where
                found += parts
        missing, of_heads, starts = (
            np.concatenate([getattr(one, name) for one in found])
            for name in ("missing", "heads", "starts")
        )
        self.reads.hits += sum(one.num_hits for one in found)
        self.reads.fetched += len(missing)
        if len(missing):
            page_class = group.page_class

            def copy() -> None:
                assert isinstance(self.copies, DirectCopies), "devices are refused"
                self.copies.load_heads(page_class, missing, of_heads, starts)

            num_bytes = len(missing) * page_class.head_bytes
            self.worker.submit(copy, num_bytes).result()
        return pages

    def _numbers(self, lane: int) -> PageNumbers:
        of_table = self.index * self.table.group.lanes_per_layer + lane
        numbers: PageNumbers = self.table.pages[self.rows, of_table]
        return numbers
