"""Counts the pages of each tenant: each page once, public prefixes on the public account."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass
from quire.tenancy.tenants import PUBLIC

NO_OWNER = -1


def bytes_by_tenant(
    memory: KVMemory,
    rows: Mapping[str, Sequence[int]],
    referenced: Mapping[str, Sequence[Mapping[str, PageNumbers]]] | None = None,
    public_tokens: Mapping[int, int] | None = None,
) -> dict[str, int]:
    """Count the bytes of the pages that each tenant refers to, every page once.

    A page of a public prefix is charged to `PUBLIC`, also while requests use it. If two tenants
    refer to one page otherwise (private salts prevent it), the tenant listed first is charged.

    Args:
        memory: the KV memory.
        rows: rows of each tenant's requests.
        referenced: pages retained without a request (`KVMemory.cached_references`), by tenant;
            public prefixes under `PUBLIC`.
        public_tokens: number of first tokens that are a public prefix, by row.

    Returns:
        Bytes by tenant and of `PUBLIC`; their sum is the bytes of all these pages.
    """
    referenced = referenced or {}
    public_tokens = public_tokens or {}
    names = [PUBLIC, *sorted((rows.keys() | referenced.keys()) - {PUBLIC})]
    if not referenced and not any(pool.num_shared for pool in memory.pools.values()):
        return {name: _unshared_bytes(memory, rows.get(name, ())) for name in names}
    owners = {c: np.full(len(p.ref_counts), NO_OWNER, np.int32) for c, p in memory.pools.items()}
    held = dict.fromkeys(names, 0)
    for row, tokens in public_tokens.items():
        for page_class, pages in _first_pages(memory, row, tokens):
            held[PUBLIC] += _claim(owners, page_class, pages, 0)
    for index, name in enumerate(names):
        for cached_reference in referenced.get(name, ()):
            for group, pages in cached_reference.items():
                page_class = memory.tables[group].group.page_class
                held[name] += _claim(owners, page_class, pages, index)
        for table in memory.tables.values():
            pages = table.pages[np.asarray(rows.get(name, ()), dtype=np.int64)]
            held[name] += _claim(owners, table.group.page_class, pages[pages >= 0], index)
    return held


def _unshared_bytes(memory: KVMemory, rows: Sequence[int]) -> int:
    index = np.asarray(rows, dtype=np.int64)
    return sum(
        int(table.num_pages[index].sum()) * table.group.page_class.page_bytes
        for table in memory.tables.values()
    )


def _first_pages(
    memory: KVMemory, row: int, tokens: int
) -> Iterator[tuple[PageClass, PageNumbers]]:
    """Yield the shared whole pages of a row's first tokens, in lanes without a window."""
    for table in memory.tables.values():
        group = table.group
        if group.window is None and not group.private:
            pages = table.pages[row][:, : tokens // group.page_class.tokens]
            counts = memory.pools[group.page_class].ref_counts
            held = pages[pages >= 0]
            yield group.page_class, held[counts[held] > 1]


def _claim(
    owners: Mapping[PageClass, NDArray[np.int32]],
    page_class: PageClass,
    pages: PageNumbers,
    owner: int,
) -> int:
    """Assign an owner to pages that have none; return their bytes."""
    owned = owners[page_class]
    free = np.unique(pages[owned[pages] == NO_OWNER])
    owned[free] = owner
    return len(free) * page_class.page_bytes
