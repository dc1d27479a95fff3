"""Chooses victims of preemption.

candidates   requests later in scheduling order, or of a tenant above its share
excluded     requests without a new token since they resumed: else preemptions would repeat
order        tenants above their share, then lower priority, then no deadline, then most freed
             bytes per lost token, then the newest
"""

from collections.abc import Callable, Iterable, Sequence
from math import isinf

import numpy as np

from quire.kv.memory import KVMemory
from quire.scheduler.group import have_moved_on
from quire.scheduler.request import Request

COMPARED = 16  # newest candidates whose bytes are compared: counting bytes reads all page entries


def may_be_preempted(request: Request) -> bool:
    """Whether a request was never preempted, or has computed tokens since it resumed.

    A group is preempted as a whole, so this must hold for all of its members.
    """
    return have_moved_on(request)


def choose_victim(
    candidates: Iterable[Request],
    worth: Callable[[Request], float],
    is_over_share: Callable[[Request], bool],
) -> Request | None:
    """Choose the request that is preempted first; None without candidates.

    Args:
        candidates: requests that may be preempted.
        worth: freed bytes per lost token of a request.
        is_over_share: whether a request's tenant holds more than its share.
    """
    ordered = sorted(candidates, key=lambda r: (is_over_share(r), *r.order), reverse=True)
    if not ordered:
        return None
    first = ordered[0]
    rank = (is_over_share(first), first.priority, isinf(first.deadline_s))
    equals = [
        r for r in ordered[:COMPARED] if (is_over_share(r), r.priority, isinf(r.deadline_s)) == rank
    ]
    return max(equals, key=lambda r: (worth(r), r.spec.arrival))


def reclaimable_bytes(memory: KVMemory, requests: Sequence[Request]) -> int:
    """Bytes freed by preempting these requests: pages that no other request refers to."""
    return sum(_pages_of_only(memory, name, requests) for name in memory.tables)


def _pages_of_only(memory: KVMemory, name: str, requests: Sequence[Request]) -> int:
    table = memory.tables[name]
    page_class = table.group.page_class
    held = np.concatenate([table.row_pages(request.memory.row) for request in requests])
    pages, references = np.unique(held, return_counts=True)
    only = memory.pools[page_class].ref_counts[pages] <= references
    return int(np.count_nonzero(only)) * page_class.page_bytes
