"""Loads the offloaded pages of a sequence layer by layer, for evictions.

    layer    0        1        2        3
    before   offloaded in all layers; staging for two of them
    then     settled  settled  offloaded ...      loaded to the staging; kept pages are copied to
                                                  pages of their own, then slots move
    after    all layers are settled: staging and offloaded bytes are freed

An eviction thus needs pages for the retained tokens only, besides the staging. Of sequences that
share the offloaded pages, each evicts on its own; the last one frees the staging and the bytes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import OutOfPages
from quire.kv.memory import KVMemory
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.page_groups import OffloadedPageGroup


class OffloadedLayers:
    """Implements `quire.eviction.eviction.LayerLoads`.

    Args:
        memory: KV memory of the sequences.
        prefixes: their offloaded prefixes.
    """

    def __init__(self, memory: KVMemory, prefixes: OffloadedPrefixes) -> None:
        self._memory, self._prefixes = memory, prefixes

    def is_offloaded(self, row: int, group: str) -> bool:
        return bool(self._page_groups(row, group))

    def read(self, row: int, group: str, layers: range) -> None:
        page_groups = self._page_groups(row, group)
        if not page_groups:
            return
        assert len(layers) == 1, "layers share staging pages"
        self._prefixes.use.finalize()
        self._prefixes.use.ahead.clear()
        for page_group in page_groups:
            pages = page_group.staging[layers.start % page_group.slots].reshape(-1)
            self._load(page_group, layers.start, pages)
        self._prefixes.pool.copies.wait()

    def require_pages(self, row: int, group: str, kept: NDArray[np.bool_], copies: int = 0) -> None:
        table = self._memory.tables[group]
        staged, per_layer = int(table.staged[row]), table.group.lanes_per_layer
        resident = (table.num_pages[row] - staged).reshape(-1, per_layer).sum(axis=1)
        by_layer = kept.reshape(len(resident), per_layer, -1)
        loaded = by_layer[:, :, :staged].sum(axis=(1, 2))
        grown = by_layer.sum(axis=(1, 2)) - resident
        if self._prefixes.is_shared(row):  # no page is freed that another sequence may share
            grown = loaded
        before = np.cumsum(grown) - grown  # of the layers that were cut before each layer
        needed = int((before + loaded).max(initial=0))
        needed = max(0, needed) + copies
        if not self._memory.fits({table.group.page_class: needed}):
            raise OutOfPages(f"{needed} pages needed to evict from an offloaded prefix")

    def settle(self, row: int, group: str, layer: int, kept: NDArray[np.bool_]) -> None:
        self.read(row, group, range(layer, layer + 1))
        table = self._memory.tables[group]
        per_layer = table.group.lanes_per_layer
        lanes = slice(layer * per_layer, (layer + 1) * per_layer)
        lane, column = np.nonzero(kept[lanes, : int(table.staged[row])])
        rows = np.full(len(lane), row)
        self._memory.privatise(table, rows, lane + lanes.start, column)

    def forget(self, row: int, group: str) -> None:
        self._prefixes.forget(row, group)

    def _load(self, page_group: OffloadedPageGroup, layer: int, pages: NDArray[np.int32]) -> None:
        page_class = self._memory.tables[page_group.group].group.page_class
        self._prefixes.pool.load(page_group.layers[layer], page_class, pages)

    def _page_groups(self, row: int, group: str) -> Sequence[OffloadedPageGroup]:
        return [held for held in self._prefixes.page_groups(row) if held.group == group]
