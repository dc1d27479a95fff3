"""The page map of an engine: which request owns each page, and the page's state."""

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.kv.page_map import (
    CACHED,
    EVICTED,
    FIRST_ROW,
    SHARED,
    PageFacts,
    read_pages,
)

if TYPE_CHECKING:
    from quire.engine.core import Engine

Snapshot = dict[str, Any]

MOST_CELLS = 100_000
"""Largest number of cells of a map; of more pages, every n-th is shown."""
_LONGEST_RUN = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class PageOwners:
    """A copy of the page map and of the names of its owners.

    Attributes:
        facts: owners and states of all pages.
        owners: request id and tenant of each row, in the order of the owners' numbers.
        groups: lane groups by page class, in the order of `facts.classes`.
        totals: bytes outside the map: of CPU memory and of the whole arena.
    """

    facts: PageFacts
    owners: list[Snapshot]
    groups: list[list[str]]
    totals: Snapshot

    def encode(self, most_cells: int = MOST_CELLS, *, with_map: bool = True) -> Snapshot:
        """The page map as JSON values; runs of equal cells are base64 of little-endian arrays.

        Args:
            most_cells: maximum number of cells.
            with_map: include the runs; without them only the totals are returned.
        """
        owner, state, kind = self.facts.in_order()
        sizes = np.array([c.page_class.page_bytes for c in self.facts.classes], dtype=np.int64)
        body = {
            "num_pages": len(owner),
            "page_classes": [self._class(i) for i in range(len(self.facts.classes))],
            "owners": self._owners(owner, sizes[kind]),
            "states": self._states(owner, state, kind, sizes),
            **self.totals,
        }
        if with_map:
            every = max(1, -(-len(owner) // most_cells))
            body["pages_per_cell"] = every
            body["runs"] = _runs(owner[::every], state[::every], kind[::every])
        return body

    def _class(self, index: int) -> Snapshot:
        one = self.facts.classes[index]
        return {
            "codec": one.codec,
            "quantized": not one.page_class.is_plain,
            "page_tokens": one.page_class.tokens,
            "page_bytes": one.page_class.page_bytes,
            "groups": self.groups[index],
        }

    def _owners(self, owner: NDArray[np.uint16], size: NDArray[np.int64]) -> list[Snapshot]:
        count = np.bincount(owner, minlength=FIRST_ROW + len(self.owners))
        held = np.bincount(owner, weights=size, minlength=len(count)).astype(np.int64)
        names = [{"kind": "free"}, {"kind": "prefix_cache"}, *self.owners]
        return [
            {"owner": number, **name, "pages": int(count[number]), "bytes": int(held[number])}
            for number, name in enumerate(names)
        ]

    def _states(
        self,
        owner: NDArray[np.uint16],
        state: NDArray[np.uint8],
        kind: NDArray[np.uint8],
        sizes: NDArray[np.int64],
    ) -> Snapshot:
        """Bytes of pages in use by state; the first three add up to them, the others overlap."""
        used = owner > 0
        plain = np.array([c.page_class.is_plain for c in self.facts.classes])[kind]
        size = np.where(used, sizes[kind], 0)
        evicted = state & EVICTED > 0

        def total(mask: NDArray[np.bool_]) -> int:
            return int(size[mask].sum())

        return {
            "exact": total(plain & ~evicted),
            "evicted": total(evicted),
            "quantized": total(~plain & ~evicted),
            "shared": total(state & SHARED > 0),
            "cached": total((state & CACHED > 0) | (owner == 1)),
        }


def read_page_map(engine: "Engine", tenant: str | None) -> PageOwners:
    """Copy the page map of an engine.

    Args:
        engine: the engine, between two steps.
        tenant: copy only the pages of this tenant's requests, without gaps: free pages and the
            distance of pages would reveal the memory use of other tenants; None: all pages.
    """
    memory = engine.pool.kv.memory
    running = [r for r in engine.scheduler.running if tenant in (None, r.tenant)]
    rows = [request.memory.row for request in running]
    owners: list[Snapshot] = [
        {"kind": "request", "request_id": r.request_id, "tenant": r.tenant} for r in running
    ]
    groups = memory.layout.groups
    return PageOwners(
        facts=read_pages(memory, rows, only_these=tenant is not None),
        owners=owners,
        groups=[[g.name for g in groups if g.page_class == c] for c in memory.pools],
        totals={} if tenant is not None else _totals(engine),
    )


def _totals(engine: "Engine") -> Snapshot:
    memory, pool = engine.pool.kv.memory, engine.pool
    offload = {} if pool.offload is None else pool.offload.totals()
    host = pool.host
    return {
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "swap": {
            "total_bytes": 0 if host is None else host.total_bytes,
            "used_bytes": 0 if host is None else host.used_bytes,
        },
        "offload": {
            "total_bytes": 0 if pool.offload is None else pool.offload.offload_bytes,
            "used_bytes": offload.get("offloaded_bytes", 0) + offload.get("activation_bytes", 0),
        },
    }


def _runs(owner: NDArray[np.uint16], state: NDArray[np.uint8], kind: NDArray[np.uint8]) -> Snapshot:
    """Run-length encoding of the cells; a run has at most 65,535 cells."""
    if not len(owner):
        return {"count": "", "owner": "", "state": "", "page_class": ""}
    changed = (owner[1:] != owner[:-1]) | (state[1:] != state[:-1]) | (kind[1:] != kind[:-1])
    first = np.concatenate([[0], np.flatnonzero(changed) + 1])
    first = np.union1d(first, np.arange(0, len(owner), _LONGEST_RUN))
    count = np.diff(first, append=len(owner)).astype("<u2")
    return {
        "count": _base64(count),
        "owner": _base64(owner[first].astype("<u2")),
        "state": _base64(state[first]),
        "page_class": _base64(kind[first]),
    }


def _base64(numbers: NDArray[Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")
