"""Logical positions of the tokens that a row's pages store, in storage order."""

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kv.step import PagedKV


def stored_positions(
    kv: PagedKV, group: str, row: int, lanes: slice = slice(None)
) -> NDArray[np.int32]:
    """Return logical positions [lanes, slots] in storage order; a copy.

    Positions past a lane's last slot are undefined, and so are positions in staging pages.
    """
    table = kv.memory.tables[group]
    tokens = table.group.page_class.tokens
    num_lanes = len(range(*lanes.indices(table.group.num_lanes)))
    columns = int(table.num_pages[row, lanes].max(initial=0))
    views = kv.store.views(table.group.page_class)
    if views.positions is None:
        first = table.page_positions[row, lanes, :columns]
        stored = np.add(first[:, :, None], np.arange(tokens), dtype=np.int32)
    else:
        pages = np.maximum(table.pages[row, lanes, :columns], 0).reshape(-1).astype(np.int64)
        found = views.positions.index_select(0, torch.from_numpy(pages).to(kv.store.device))
        stored = found.cpu().numpy()
    by_lane: NDArray[np.int32] = stored.reshape(num_lanes, columns * tokens)
    return by_lane
