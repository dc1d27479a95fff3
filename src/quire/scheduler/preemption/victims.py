"""Who gives way when the KV memory is full.

candidates   behind the one that needs room, or of a tenant that owes memory to its tenant
never        one that has entered again and not moved on since: it would be thrown out in circles
order        tenants in debt, then lower priority, then those without a deadline, then most bytes
             won for the work lost, newest
"""

from collections.abc import Callable, Iterable, Sequence
from math import isinf

import numpy as np

from quire.kv.memory import KVMemory
from quire.scheduler.group import have_moved_on
from quire.scheduler.request import Request

COMPARED = 16  # newest candidates whose bytes are counted: counting costs a pass over their pages


def may_be_preempted(request: Request) -> bool:
    """Whether a request is in for the first time, or has moved on since it came back.

    A group goes as one, so all of it must have.
    """
    return have_moved_on(request)


def choose_victim(
    candidates: Iterable[Request],
    worth: Callable[[Request], float],
    owes: Callable[[Request], bool],
) -> Request | None:
    """The request that gives way first.

    Args:
        candidates: who may.
        worth: bytes won for the work lost.
        owes: whether its tenant holds more than its share.
    """
    ordered = sorted(candidates, key=lambda r: (owes(r), *r.order), reverse=True)
    if not ordered:
        return None
    first = ordered[0]
    rank = (owes(first), first.priority, isinf(first.deadline_s))
    alike = [r for r in ordered[:COMPARED] if (owes(r), r.priority, isinf(r.deadline_s)) == rank]
    return max(alike, key=lambda r: (worth(r), r.spec.arrival))


def reclaimable_bytes(memory: KVMemory, requests: Sequence[Request]) -> int:
    """Bytes that return when these requests go: pages that nobody else refers to."""
    return sum(_pages_of_only(memory, name, requests) for name in memory.tables)


def _pages_of_only(memory: KVMemory, name: str, requests: Sequence[Request]) -> int:
    table = memory.tables[name]
    page_class = table.group.page_class
    rows = np.array([request.memory.row for request in requests], dtype=np.int64)
    named = np.concatenate([table.row_pages(request.memory.row) for request in requests])
    pages, times = np.unique(named, return_counts=True)
    only = memory.pools[page_class].ref_counts[pages] <= times
    set_aside_pages = memory.placement.reserved_pages(table, rows).sum()
    return (int(np.count_nonzero(only)) + int(set_aside_pages)) * page_class.page_bytes
