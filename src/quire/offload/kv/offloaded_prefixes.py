"""Sequences whose first pages are on the host: in the arena each has room for two layers of them.

    layer     0       1       2       3            pages of a lane, front | rest
    table   a b|p q  c d|r s  a b|t u  c d|v w     a b c d: staging, two slots in turns
    host    A0 B0    A1 B1    A2 B2    A3 B3       the bytes of the front, a layer in one piece

Where memory is short one slot is left: a layer's bytes are copied when the one before attended.

Every layer finds its lanes complete: the front's table entries name staging pages, which all layers
of a slot share, and the bytes of a layer are brought there before it attends (see `streaming`). So
whoever reads pages in a step reads these too, whatever codec, backend or statistics there are, and
of a front of n layers the arena holds two. Pages behind the front are the sequence's own, and new
tokens are written there.

Bookkeeping, and the copies that it asks of a `PageBytes`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, OutOfPages
from quire.kv.listeners import MemoryListener
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.repacking import repack
from quire.kv.tables import LaneTable, Rows
from quire.layout.layout import SLOTS, can_be_offloaded
from quire.layout.pages import PageClass
from quire.offload.kv.staging import StagingUse, name_pages, stage, staged_pages
from quire.offload.swap.host_pool import HostPool, HostSpace

ReadPositions = Callable[[PageClass, PageNumbers], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class OffloadedPageGroup:
    """Pages of one group of one sequence that went to the host together.

    Attributes:
        group: its name.
        first: column of the first one.
        layers: for each layer of the group where the bytes of its pages are, lane by lane.
        staging: [slots, lanes of a layer, pages of a lane] pages of the arena.
        positions: [lanes, slots] logical ones of what lies there; None where lanes are in order.
    """

    group: str
    first: int
    layers: Sequence[HostSpace]
    staging: PageNumbers
    positions: NDArray[np.int32] | None = None

    @property
    def columns(self) -> int:
        """Pages of a lane."""
        return int(self.staging.shape[2])

    @property
    def slots(self) -> int:
        """Layers whose pages the staging holds at a time."""
        return len(self.staging)


class OffloadedPrefixes(MemoryListener):
    """The fronts of all sequences of a memory.

    Args:
        memory: where they are.
        pool: takes their bytes, and nobody else's.
        read_positions: logical positions of pages' slots, of a class that carries them.

    Attributes:
        pool: see above.
        use: the step that reads the staging pages.

    Raises:
        ConfigError: the store lays lanes out in runs.
    """

    def __init__(
        self, memory: KVMemory, pool: HostPool, read_positions: ReadPositions | None = None
    ) -> None:
        if not memory.placement.shares:
            raise ConfigError(
                "expected a store whose pages lie anywhere, as paged: lanes in one piece cannot "
                "have their first pages on the host"
            )
        self._memory, self.pool = memory, pool
        self._pieces: dict[int, list[OffloadedPageGroup]] = {}
        self.use = StagingUse()
        self._read_positions = read_positions
        memory.listeners.subscribe(self)

    @property
    def rows(self) -> frozenset[int]:
        """Sequences with a front on the host."""
        return frozenset(self._pieces)

    def pieces(self, row: int) -> Sequence[OffloadedPageGroup]:
        """The front of a sequence; empty where it has none."""
        return self._pieces.get(row, ())

    def gain_bytes(self, row: int, slots: int, holders: int = 1) -> int:
        """Bytes of the arena that hosting the slots before this one would free.

        Args:
            row: the sequence.
            slots: as for `host`.
            holders: most that may name a page which will be free then: 2 where the others may be
                cached prefixes, which can be dropped. Pages that more share free nothing.
        """
        gained = 0
        for table, first, columns in self._moves(row, slots):
            own = self._own(table, row, first, columns, holders)
            staged = staged_pages(table, columns)
            gained += (own - staged) * table.group.page_class.page_bytes
        return gained

    def host(self, row: int, slots: int) -> int:
        """Move the pages of the slots before this one to the host; return how many bytes moved.

        Whole pages only. Groups of no more layers than there are slots stay, and so do those that
        look back through a window: they would gain nothing.

        Raises:
            OutOfPages: no pages to stage a group; what was moved before it stays moved.
            HostPoolFull: the pool does not hold a group; likewise.
        """
        moves = list(self._moves(row, slots))
        self.use.finalize()
        moved = [self._host(table, row, first, columns) for table, first, columns in moves]
        return sum(map(self._bytes, moved))

    def released(self, rows: Rows) -> None:
        """Free the offloaded pages of sequences."""
        gone = self._pieces.keys() & set(rows.tolist())
        if gone:
            self.use.finalize()
        for row in gone:
            self._forget(row)

    def _forget(self, row: int) -> None:
        """Let go of the bytes of a sequence."""
        for piece in self._pieces.pop(row, ()):
            table = self._memory.tables[piece.group]
            table.staged[row] = table.repeated[row] = 0
            for space in piece.layers:
                self.pool.release(space)

    def load_back(self, row: int) -> None:
        """Let a sequence have all its pages in the arena again; its staging is some of them.

        Raises:
            OutOfPages: no room for the others; nothing was changed.
        """
        needed: dict[PageClass, int] = {}
        for piece in self.pieces(row):
            table = self._memory.tables[piece.group]
            page_class = table.group.page_class
            pages = piece.columns * table.group.num_lanes - piece.staging.size
            needed[page_class] = needed.get(page_class, 0) + pages
        if not self._memory.fits(needed):
            raise OutOfPages(f"{sum(needed.values())} pages needed to bring a front back")
        self.use.finalize()
        for piece in self.pieces(row):
            self._load_back(row, piece)
        self._forget(row)

    def halve_staging(self, row: int) -> int:
        """Leave one slot of a sequence's staging and free the other; return the bytes freed.

        From then on a layer's bytes are copied when the layer before it has attended.
        """
        before = self._memory.row_bytes(row)
        if any(piece.slots > 1 for piece in self.pieces(row)):
            self.use.finalize()
            self._pieces[row] = [self._halved(row, piece) for piece in self.pieces(row)]
        return before - self._memory.row_bytes(row)

    def repack(self, row: int) -> None:
        """Move the pages of a sequence together, into as few slabs as hold them.

        Pages of its staging are allocated again: every step loads what they hold.
        """
        self.use.finalize()
        memory, pieces = self._memory, self.pieces(row)
        for piece in pieces:
            table, end = memory.tables[piece.group], piece.first + piece.columns
            named = table.pages[row, :, piece.first : end]
            memory.pools[table.group.page_class].release(named.ravel())
        repack(memory, row)
        for i, piece in enumerate(pieces):
            place = memory.tables[piece.group], row, piece.first, piece.columns, piece.slots
            self._pieces[row][i] = replace(piece, staging=stage(memory, *place))

    def positions(self, row: int, group: str, index: int, slots: range) -> NDArray[np.int64]:
        """Logical positions of slots of a front, in a layer's first lane.

        Args:
            row: the sequence.
            group: of the layer.
            index: the layer, counted inside its group.
            slots: of the front.
        """
        pieces = [piece for piece in self.pieces(row) if piece.group == group]
        if not pieces or pieces[0].positions is None:
            return np.array(slots, dtype=np.int64)
        lane = index * self._memory.tables[group].group.lanes_per_layer
        found = np.concatenate(
            [piece.positions[lane] for piece in pieces if piece.positions is not None]
        )
        return found[slots.start : slots.stop].astype(np.int64)

    # ---- one group -----------------------------------------------------------------------------

    def _moves(self, row: int, slots: int) -> Iterator[tuple[LaneTable, int, int]]:
        """Tables, the first page to move, and how many of each lane."""
        for table in self._memory.tables.values():
            group = table.group
            if not can_be_offloaded(group):
                continue
            first = int(table.staged[row])
            columns = min(slots, int(table.num_slots[row].min())) // group.page_class.tokens - first
            if columns > 0:
                yield table, first, columns

    def _host(self, table: LaneTable, row: int, first: int, columns: int) -> OffloadedPageGroup:
        memory, group = self._memory, table.group
        pool = memory.pools[group.page_class]
        staged = staged_pages(table, columns)
        fits_behind = self._own(table, row, first, columns) >= staged  # what goes makes room
        if not fits_behind and not memory.fits({group.page_class: staged}):
            raise OutOfPages(f"{staged} pages needed to stage {columns} of each lane")
        old = table.pages[row, :, first : first + columns].copy()
        layers = self._save(group.page_class, old.reshape(len(group.layers), -1))
        positions = None
        if group.page_class.positions and self._read_positions is not None:
            positions = self._read_positions(group.page_class, old.reshape(-1))
            positions = positions.reshape(len(old), -1)
        pool.release(old.reshape(-1))
        staging = stage(self._memory, table, row, first, columns, SLOTS)
        table.staged[row] = first + columns
        table.repeated[row] += group.num_lanes * columns - staging.size
        piece = OffloadedPageGroup(group.name, first, layers, staging, positions)
        self._pieces.setdefault(row, []).append(piece)
        return piece

    def _halved(self, row: int, piece: OffloadedPageGroup) -> OffloadedPageGroup:
        """A piece of one staging slot, which the entries of all layers name."""
        table = self._memory.tables[piece.group]
        group, pool = table.group, self._memory.pools[table.group.page_class]
        columns = slice(piece.first, piece.first + piece.columns)
        old = table.pages[row, :, columns].reshape(len(group.layers), -1)
        first = piece.staging[:1]
        moved = (old != old[0]).any(axis=1)  # layers of the other slots
        for _ in range(int(moved.sum())):
            pool.retain(first.reshape(-1))
        pool.release(old[moved].reshape(-1))
        name_pages(table, row, piece.first, np.tile(first[0], (len(group.layers), 1)))
        table.repeated[row] += piece.staging.size - first.size
        return replace(piece, staging=first)

    def _load_back(self, row: int, piece: OffloadedPageGroup) -> None:
        memory, table = self._memory, self._memory.tables[piece.group]
        group, pool = table.group, memory.pools[table.group.page_class]
        columns = slice(piece.first, piece.first + piece.columns)
        staged = piece.slots * group.lanes_per_layer  # lanes, whose pages the staging becomes
        old = table.pages[row, staged:, columns].reshape(-1).copy()
        fresh = np.concatenate([piece.staging.reshape(-1), pool.allocate(old.size)])
        for pages, space in zip(fresh.reshape(len(group.layers), -1), piece.layers, strict=True):
            self.pool.load(space, group.page_class, pages)
        self.pool.copies.wait()
        name_pages(table, row, piece.first, fresh.reshape(group.num_lanes, -1))
        pool.release(old)

    def _save(self, page_class: PageClass, by_layer: PageNumbers) -> list[HostSpace]:
        """The bytes of pages [layer, page] in the pool, all or none."""
        spaces: list[HostSpace] = []
        try:
            for pages in by_layer:
                spaces.append(self.pool.reserve({page_class: len(pages)}))
                self.pool.save(spaces[-1], page_class, pages)
        except BaseException:
            for space in spaces:
                self.pool.release(space)
            raise
        self.pool.copies.wait()
        return spaces

    def _own(self, table: LaneTable, row: int, first: int, columns: int, holders: int = 1) -> int:
        """Pages that no more than so many name."""
        pages = table.pages[row, :, first : first + columns]
        counts = self._memory.pools[table.group.page_class].ref_counts[pages]
        return int(np.count_nonzero(counts <= holders))

    def _bytes(self, piece: OffloadedPageGroup) -> int:
        group = self._memory.tables[piece.group].group
        return piece.columns * group.num_lanes * group.page_class.page_bytes
