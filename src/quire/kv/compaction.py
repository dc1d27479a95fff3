"""Compaction: free the pages of evicted slots and keep the remaining slots of a lane dense.

    fill_holes   slots from the end of the lane fill the holes: fewest moves, slot order is lost
    keep_order   retained slots shift towards slot 0 in order
    drop_pages   whole pages are removed from the page table: no slot moves

Attention does not depend on the order of slots: keys are stored after RoPE and each slot records
its position. Policies that evict chunks or pages of neighbouring tokens need the order, so all
compactions of a row have the same kind.

Compaction has two phases. The plan counts the pages to copy and the pages to free. The commit
copies shared pages first; the attention statistics of a slot move with it. Lanes of one row may
retain different numbers of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.slot_moves import (
    Mask,
    SlotMoves,
    close_gaps,
    fill_holes,
    no_moves,
    prove_one_to_one,
    retained_pages,
)
from quire.kv.tables import LaneTable, Rows, cut_slots
from quire.layout.pages import PageClass

Pages = Mapping[PageClass, int]


class Kind(Enum):
    """How compaction frees the pages of evicted slots."""

    FILL_HOLES = "fill_holes"
    KEEP_ORDER = "keep_order"
    DROP_PAGES = "drop_pages"


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """Planned compaction of one row in one lane group; the memory is still unchanged."""

    group: str
    row: int
    held_slots: NDArray[np.int32]  # [lanes] slots of each lane when the plan was computed
    offloaded: int  # first pages of each lane that stay offloaded
    keep: Mask  # [lanes, slots] True for retained slots
    moves: SlotMoves  # one source to one target
    kept_columns: Mask | None  # [lanes, columns] if whole pages are dropped, else None
    statistics: tuple[str, ...]  # groups that mirror this one and that the row uses
    needed_pages: Pages  # private page copies before slots move, by page class
    freed_pages: Pages  # by page class; shared pages are not counted

    @property
    def keep_slots(self) -> NDArray[np.int32]:
        """Number of retained slots of each lane, [lanes]."""
        kept: NDArray[np.int32] = self.keep.sum(axis=1, dtype=np.int32)
        return kept

    @property
    def gain_bytes(self) -> int:
        """Net bytes freed; if not positive, the plan frees no memory."""
        freed = sum(page_class.page_bytes * n for page_class, n in self.freed_pages.items())
        return freed - sum(page_class.page_bytes * n for page_class, n in self.needed_pages.items())


def plan_compaction(
    memory: KVMemory,
    group: str,
    row: int,
    keep: Mask,
    kind: Kind = Kind.FILL_HOLES,
) -> CompactionPlan:
    """Compute the compaction plan for a keep mask.

    If a move would write a page that is otherwise referenced only by the prefix cache, the page
    may be evicted from the prefix cache.

    Raises:
        ConfigError: the group is ordered and slots would move, or the group holds statistics; the
            mask does not cover the lanes' slots, or it splits a page where whole pages are dropped.
    """
    table = memory.tables[group]
    if table.group.private:
        raise ConfigError(f"group {group!r} holds statistics, which move with their slots")
    keep = _live(table, row, keep)
    kept_columns = None
    if kind is Kind.DROP_PAGES:
        kept_columns = retained_pages(keep, table.num_slots[row], table.group.page_class.tokens)
    if table.group.ordered and kept_columns is None:
        raise ConfigError(
            f"the slots of group {group!r} are ordered and cannot be moved: drop whole pages "
            "instead"
        )
    moves = no_moves() if kept_columns is not None else _moves(keep, kind)
    mirrors = followers(memory, group, row)
    statistics, tables = tuple(mirror.group.name for mirror in mirrors), [table, *mirrors]
    lane, column = _shared_targets(memory, table, row, moves)
    shared = table.pages[row, lane, column]
    if len(shared) and memory.listeners.unpublish(table.group.page_class, shared).any():
        lane, _ = _shared_targets(memory, table, row, moves)
    needed = {table.group.page_class: len(lane)}
    freed, offloaded = _freed_pages(memory, tables, row, keep, kept_columns), 0
    if table.staged[row]:
        offloaded = _count_offloaded(memory, table, row, keep, kept_columns, needed, freed)
    return CompactionPlan(
        group=group,
        row=row,
        held_slots=table.num_slots[row].copy(),
        offloaded=offloaded,
        keep=keep,
        moves=moves,
        kept_columns=kept_columns,
        statistics=statistics,
        needed_pages=needed,
        freed_pages=freed,
    )


def _live(table: LaneTable, row: int, keep: Mask) -> Mask:
    slots = table.num_slots[row]
    longest = int(slots.max(initial=0))
    if keep.shape[0] != len(slots) or keep.shape[1] < longest:
        raise ConfigError(f"expected keep [{len(slots)}, {longest}], got {list(keep.shape)}")
    live: Mask = keep[:, :longest] & (np.arange(longest) < slots[:, None])
    return live


def _count_offloaded(
    memory: KVMemory,
    table: LaneTable,
    row: int,
    keep: Mask,
    kept_columns: Mask | None,
    needed: dict[PageClass, int],
    freed: dict[PageClass, int],
) -> int:
    """Count the first pages of each lane that stay offloaded; add the pages of the other lanes.

    The layers are cut one after the other. Retained pages after those that stay offloaded get pages
    of their own in the arena. None stay offloaded if other sequences share the offloaded pages.
    """
    group, staged = table.group, int(table.staged[row])
    page_class = group.page_class
    pool, entries = memory.pools[page_class], table.pages[row, :, :staged]
    staging, times = np.unique(entries, return_counts=True)
    is_shared = bool((pool.ref_counts[staging] != times).any())
    slots = keep.sum(axis=1)
    offloaded = 0 if is_shared else min(staged, int(slots.min()) // page_class.tokens)
    pages = page_columns(keep, kept_columns, page_class.tokens)
    grown, most = _growth(memory, table, row, pages, offloaded)
    left = len(staging) // staged * offloaded
    gained = (0 if is_shared else len(staging) - left) - grown
    needed[page_class] += most
    freed[page_class] = gained + most
    return offloaded


def _growth(
    memory: KVMemory, table: LaneTable, row: int, pages: Mask, offloaded: int
) -> tuple[int, int]:
    """Pages that a row with offloaded pages gains, cut layer by layer: at the end, and at most.

    Args:
        memory: with the row.
        table: page table of the group.
        row: the sequence.
        pages: the retained pages [lanes, columns].
        offloaded: first retained pages of each lane that stay offloaded.
    """
    staged, resident = int(table.staged[row]), table.pages[row, :, : pages.shape[1]]
    stays = after_first(pages, offloaded)
    counts = memory.pools[table.group.page_class].ref_counts
    is_freed = ~stays & (resident >= 0) & (counts[resident] == 1)
    grown = stays[:, :staged].sum(axis=1) - is_freed[:, staged:].sum(axis=1)
    grown = grown.reshape(-1, table.group.lanes_per_layer).sum(axis=1)
    return int(grown.sum()), max(0, int(np.cumsum(grown).max()))


def page_columns(keep: Mask, kept_columns: Mask | None, page_tokens: int) -> Mask:
    """Mask [lanes, columns] of the pages that lanes have after their slots have moved."""
    if kept_columns is not None:
        return kept_columns
    columns = np.arange(-(-keep.shape[1] // page_tokens))
    found: Mask = columns < -(-keep.sum(axis=1) // page_tokens)[:, None]
    return found


def after_first(pages: Mask, number: int) -> Mask:
    """Mask of the pages after the first `number` pages of each lane."""
    found: Mask = pages & (np.cumsum(pages, axis=1) > number)
    return found


def _moves(keep: Mask, kind: Kind) -> SlotMoves:
    return fill_holes(keep) if kind is Kind.FILL_HOLES else close_gaps(keep)


def _shared_targets(
    memory: KVMemory, table: LaneTable, row: int, moves: SlotMoves
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the table entries (lanes, columns) of shared pages that would be written.

    Staging pages, which all layers share, may be written.
    """
    pool = memory.pools[table.group.page_class]
    if not pool.num_shared:
        return moves.lane[:0], moves.lane[:0]
    targets = np.zeros(table.pages.shape[1:], dtype=bool)
    targets[moves.lane, moves.target // table.group.page_class.tokens] = True
    targets[:, : table.staged[row]] = False
    targets = memory.united(targets)
    lane, column = np.nonzero(targets)
    shared = pool.ref_counts[table.pages[row, lane, column]] > 1
    return lane[shared], column[shared]


def _freed_pages(
    memory: KVMemory, tables: list[LaneTable], row: int, keep: Mask, kept_columns: Mask | None
) -> dict[PageClass, int]:
    freed: dict[PageClass, int] = {}
    for table in tables:
        page_class, num_pages = table.group.page_class, table.num_pages[row][:, None]
        column = np.arange(int(num_pages.max(initial=0)))
        still_filled = column < -(-keep.sum(axis=1) // page_class.tokens)[:, None]
        dropped = (column < num_pages) & ~(still_filled if kept_columns is None else kept_columns)
        pages = table.pages[row, :, : len(column)][dropped]
        alone = memory.pools[page_class].ref_counts[pages] == 1
        freed[page_class] = freed.get(page_class, 0) + int(np.count_nonzero(alone))
    return freed


def require_private_copies(memory: KVMemory, *plans: CompactionPlan) -> None:
    """Refuse plans whose private copies do not fit, before other data is written for the plans."""
    needed: dict[PageClass, int] = {}
    for plan in plans:
        for page_class, count in plan.needed_pages.items():
            needed[page_class] = needed.get(page_class, 0) + count
    _require_pages(memory, needed)


def _require_pages(memory: KVMemory, needed: Pages) -> None:
    if not memory.fits(needed):
        raise OutOfPages(f"{sum(needed.values())} private pages needed before compaction")


def _require_now(
    memory: KVMemory, plans: Sequence[CompactionPlan]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Check that the pages fit which all plans need now; return the shared targets of each.

    Rows may have been forked or cached since they were planned.

    Raises:
        OutOfPages: they do not fit; nothing was changed.
    """
    shared, needed = [], dict.fromkeys(memory.pools, 0)
    for plan in plans:
        table = memory.tables[plan.group]
        shared.append(_shared_targets(memory, table, plan.row, plan.moves))
        needed[table.group.page_class] += len(shared[-1][0])
        if table.staged[plan.row]:
            pages = page_columns(plan.keep, plan.kept_columns, table.group.page_class.tokens)
            _, most = _growth(memory, table, plan.row, pages, plan.offloaded)
            needed[table.group.page_class] += most
    _require_pages(memory, needed)
    return shared


@runtime_checkable  # for the type checks in tests
class SlotMover(Protocol):
    """Moves the slots of KV lanes, for codecs that encode whole pages."""

    def move(self, table: LaneTable, plan: CompactionPlan) -> None:
        """Move the slots of a plan in a table whose pages are private and not yet freed."""


def commit_compaction(
    memory: KVMemory,
    *plans: CompactionPlan,
    movers: Mapping[str, SlotMover] = MappingProxyType({}),
) -> None:
    """Execute all plans or none: copy shared pages, move slots, free pages.

    Args:
        memory: with the rows of the plans.
        plans: one for each row and lane group.
        movers: of lane groups whose pages are encoded as a whole, by name.
    """
    for plan in plans:
        if (memory.tables[plan.group].num_slots[plan.row] != plan.held_slots).any():
            raise InvariantError(f"row {plan.row} has changed since its compaction was planned")
        if __debug__ and plan.kept_columns is None:
            prove_one_to_one(plan.keep, plan.moves)
    shared = _require_now(memory, plans)
    for plan, (lane, column) in zip(plans, shared, strict=True):
        if len(lane):
            row = np.full(len(lane), plan.row)
            memory.privatise(memory.tables[plan.group], row, lane, column)
            memory.note_peaks(row[:1])
    for plan in plans:
        for name in (plan.group, *plan.statistics):
            table = memory.tables[name]
            if table.staged[plan.row] and memory.offloaded is not None:
                pages = page_columns(plan.keep, plan.kept_columns, table.group.page_class.tokens)
                memory.offloaded.compact(plan.row, name, plan.moves, pages, plan.offloaded)
                table.num_slots[plan.row] = plan.keep_slots
                set_all_bounds(memory, table, np.array([plan.row]))
                continue
            _move(memory, table, plan, movers.get(plan.group))
            if plan.kept_columns is None:
                freed = cut_slots(table, np.array([plan.row]), plan.keep_slots[None])
            else:
                freed = table.keep_columns(plan.row, plan.kept_columns)
                table.num_slots[plan.row] = plan.keep_slots
            memory.pools[table.group.page_class].release(freed)
            set_all_bounds(memory, table, np.array([plan.row]))
        moves = plan.moves if plan.kept_columns is None else None  # None: whole pages were dropped
        memory.listeners.compacted(plan.row, plan.group, moves, int(plan.keep_slots.min()))


def commit_counts(
    memory: KVMemory, group: str, rows: Rows, keep_slots: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Free the pages after the first slots of rows, whose retained slots are these by now.

    The pages to free follow from the counts: which tokens they held is not needed.

    Args:
        memory: pages of retained slots are not shared.
        group: a lane group.
        rows: rows with the same statistics.
        keep_slots: [rows, lanes] slots to retain.

    Returns:
        The freed bytes of each row.
    """
    freed_bytes = np.zeros(len(rows), dtype=np.int64)
    for table in (memory.tables[group], *followers(memory, group, int(rows[0]))):
        page_class, held = table.group.page_class, table.num_pages[rows]
        pages, pool = cut_slots(table, rows, keep_slots), memory.pools[page_class]
        of_row = np.repeat(np.arange(len(rows)), (held - table.num_pages[rows]).sum(axis=1))
        alone = pool.ref_counts[pages] == 1
        freed_bytes += np.bincount(of_row[alone], minlength=len(rows)) * page_class.page_bytes
        pool.release(pages)
        set_all_bounds(memory, table, rows)
    for row, fewest in zip(rows.tolist(), keep_slots.min(axis=1).tolist(), strict=True):
        memory.listeners.compacted(row, group, None, fewest)
    return freed_bytes


def set_all_bounds(memory: KVMemory, table: LaneTable, rows: Rows) -> None:
    """Compute the bounds of the pages of rows again, whose slots have moved."""
    if table.group.page_class.has_bounds:
        held = table.num_pages[rows][:, :, None]
        index, lane, column = np.nonzero(np.arange(int(held.max(initial=0))) < held)
        memory.set_bounds(table, rows[index], lane, column)


def copy_shared(
    memory: KVMemory, group: str, rows: Rows, written: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Copy the shared pages of rows that are about to be written.

    Args:
        memory: cached prefixes may be evicted for the copies.
        group: a lane group.
        rows: rows to compact.
        written: [rows, lanes, columns] pages to write.

    Returns:
        The copied bytes of each row.

    Raises:
        OutOfPages: no pages for the copies.
    """
    table, written = memory.tables[group], memory.united(written)
    page_class, pool = table.group.page_class, memory.pools[table.group.page_class]
    if not pool.num_shared:
        return np.zeros(len(rows), dtype=np.int64)

    def shared() -> tuple[NDArray[np.int64], ...]:
        pages = table.pages[rows, :, : written.shape[2]]
        return np.nonzero(written & (pool.ref_counts[pages] > 1))

    index, lane, column = shared()
    memory.listeners.unpublish(page_class, table.pages[rows[index], lane, column])
    index, lane, column = shared()
    _require_pages(memory, {page_class: len(lane)})
    if len(lane):
        memory.privatise(table, rows[index], lane, column)
        memory.note_peaks(np.unique(rows[index]))
    return np.bincount(index, minlength=len(rows)) * page_class.page_bytes


def followers(memory: KVMemory, group: str, row: int) -> list[LaneTable]:
    """Return the tables that mirror a group and that a row uses."""
    tables = (memory.tables[one.name] for one in memory.layout.followers_of(group))
    return [table for table in tables if table.active[row]]


def _move(
    memory: KVMemory, table: LaneTable, plan: CompactionPlan, mover: SlotMover | None
) -> None:
    if mover is not None and table.group.page_class.per_page and plan.kept_columns is None:
        mover.move(table, plan)
        return
    move_slots(memory, table, plan.row, plan.moves)


def move_slots(memory: KVMemory, table: LaneTable, row: int, moves: SlotMoves) -> None:
    """Copy the slots of a row in the pages that its lanes have now."""
    if not len(moves):
        return
    tokens = table.group.page_class.tokens
    lane, source, target = moves.lane, moves.source, moves.target
    memory.store.move_slots(
        table.group.page_class,
        (table.pages[row, lane, source // tokens], source % tokens),
        (table.pages[row, lane, target // tokens], target % tokens),
    )
