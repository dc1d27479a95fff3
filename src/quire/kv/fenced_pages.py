"""Pages that are in use while a copy in flight reads them; see `quire.kv.fences`."""

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import NO_PAGES
from quire.kv.stored_sequences import PagesByClass
from quire.layout.pages import PageClass


def order_still_used(memory: KVMemory, pages: PagesByClass) -> None:
    """Order later computation after the copies of pages that other rows may write.

    Pages that only the prefix cache references are written after they are allocated, or after a
    row shares them; both are ordered.
    """
    if not memory.arena.fences:
        return
    for page_class, numbers in pages.items():
        references = memory.pools[page_class].ref_counts[numbers]
        used = numbers[references > _cached_references(memory, page_class)[numbers]]
        memory.arena.fences.before_use(used, page_class.page_bytes)


def _cached_references(memory: KVMemory, page_class: PageClass) -> NDArray[np.int64]:
    cached = [
        numbers.reshape(-1)
        for references in memory.cached_references.values()
        for name, numbers in references.items()
        if memory.tables[name].group.page_class == page_class
    ]
    num_pages = len(memory.pools[page_class].ref_counts)
    return np.bincount(np.concatenate([NO_PAGES, *cached]), minlength=num_pages)
