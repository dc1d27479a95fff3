"""Sharing pages: fork a sequence, lend a prefix, start from a loan.

A shared page has more than one reference and is never written; `KVMemory.grow` copies the one page
it must write. Private groups (statistics) are copied at once: two futures, two memories.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.errors import ConfigError, InvariantError, OutOfPages, UnsoundCombination
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable
from quire.kv.whole_rows import copy_row
from quire.spec.pages import PageClass


@dataclass(frozen=True, slots=True)
class Loan:
    """Pages kept alive without a sequence: what a prefix index holds.

    Attributes:
        key: identity in `KVMemory.loans`.
        tokens: length of the prefix, whole pages.
        pages: group name -> page numbers [lanes * pages_per_lane].
    """

    key: int
    tokens: int
    pages: Mapping[str, PageNumbers]


def fork(memory: KVMemory, row: int) -> int:
    """Start a sequence equal to `row`, sharing all its pages but the private ones.

    A store whose pages have one holder each copies the whole row.

    Raises:
        OutOfPages: no row, or no pages for the private copies; nothing was changed.
    """
    if not memory.placement.shares:
        return copy_row(memory, row)
    private = [t for t in memory.tables.values() if t.group.private]
    needed: dict[PageClass, int] = {}
    for table in private:
        page_class = table.group.page_class
        needed[page_class] = needed.get(page_class, 0) + int(table.num_pages[row].sum())
    if not memory.fits(needed):
        raise OutOfPages("no pages for the statistics of a fork")
    child = memory.start()
    for table in memory.tables.values():
        table.copy_row(row, child)
        memory.pools[table.group.page_class].retain(table.row_pages(row))
        if table.group.private:
            _privatise_row(memory, table, child)
    memory.lengths[child] = memory.lengths[row]
    memory.note_peaks(np.array([child]))
    return child


def _privatise_row(memory: KVMemory, table: LaneTable, row: int) -> None:
    lane, column = np.nonzero(table.pages[row] >= 0)
    memory.privatise(table, np.full(len(lane), row), lane, column)


def lend(memory: KVMemory, row: int, tokens: int) -> Loan:
    """Keep the pages of the first `tokens` tokens alive after the sequence is gone.

    Raises:
        ConfigError: not whole pages, longer than the row, or a lane no longer holds exactly these
            tokens in order (it has evicted, or returned pages behind a window).
        UnsoundCombination: the store's pages have one holder each.
    """
    if not memory.placement.shares:
        raise UnsoundCombination(
            "a page of a contiguous run has one holder, so no prefix can be lent: use the store "
            "'paged'"
        )
    pages = {
        name: _prefix_pages(memory, table, row, tokens)
        for name, table in memory.tables.items()
        if not table.group.private
    }
    for name, numbers in pages.items():
        memory.pools[memory.tables[name].group.page_class].retain(numbers)
    key = next(memory.loan_keys)
    memory.loans[key] = pages
    return Loan(key, tokens, pages)


def _prefix_pages(memory: KVMemory, table: LaneTable, row: int, tokens: int) -> PageNumbers:
    per_page, length = table.group.page_class.tokens, int(memory.lengths[row])
    if tokens < 1 or tokens % per_page or tokens > length:
        raise ConfigError(
            f"a loan is whole pages of {per_page} tokens up to {length}, got {tokens}"
        )
    if (table.num_slots[row] != length).any():
        raise ConfigError(f"group {table.group.name!r} no longer holds every token of the prefix")
    pages: PageNumbers = table.pages[row][:, : tokens // per_page].reshape(-1).copy()
    return pages


def borrow(memory: KVMemory, loan: Loan) -> int:
    """Start a sequence from a loan; its private groups begin with zeroed pages.

    Raises:
        OutOfPages: no row, or no pages for the private groups; nothing was changed.
        InvariantError: the loan has been returned.
    """
    _require_lent(memory, loan)
    private = [t.group for t in memory.tables.values() if t.group.private]
    needed: dict[PageClass, int] = {}
    for group in private:
        pages = group.page_class.pages_for(loan.tokens) * group.num_lanes
        needed[group.page_class] = needed.get(group.page_class, 0) + pages
    if not memory.fits(needed):
        raise OutOfPages("no pages for the statistics of a borrowed prefix")
    row = memory.start()
    for table in memory.tables.values():
        _borrow_table(memory, table, row, loan)
    memory.lengths[row] = loan.tokens
    memory.note_peaks(np.array([row]))
    return row


def _borrow_table(memory: KVMemory, table: LaneTable, row: int, loan: Loan) -> None:
    group, pool = table.group, memory.pools[table.group.page_class]
    per_lane = group.page_class.pages_for(loan.tokens)
    if group.private:
        pages = pool.allocate(per_lane * group.num_lanes)
        memory.store.clear_pages(group.page_class, pages)
    else:
        pages = loan.pages[group.name]
        pool.retain(pages)
    counts = np.full((1, group.num_lanes), per_lane, dtype=np.int32)
    table.append(np.array([row]), counts, pages)
    table.num_slots[row] = loan.tokens
    table.page_positions[row, :, :per_lane] = np.arange(per_lane) * group.page_class.tokens


def return_loan(memory: KVMemory, loan: Loan) -> None:
    """Let a loan's pages go; those still named by sequences live on.

    Raises:
        InvariantError: the loan has been returned.
    """
    _require_lent(memory, loan)
    for name, pages in memory.loans.pop(loan.key).items():
        memory.pools[memory.tables[name].group.page_class].release(pages)


def _require_lent(memory: KVMemory, loan: Loan) -> None:
    if loan.key not in memory.loans:
        raise InvariantError(f"loan {loan.key} of {loan.tokens} tokens has been returned already")
