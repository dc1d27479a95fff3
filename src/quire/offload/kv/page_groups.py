"""Pages of a lane group that were offloaded together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.pages import PageNumbers
from quire.offload.swap.host_pool import HostSpace


@dataclass(frozen=True, slots=True)
class OffloadedPageGroup:
    """Pages of one group of one sequence that were offloaded together.

    Attributes:
        group: name of the group.
        first: column of the first page.
        layers: location of the pages' bytes for each layer of the group, lane by lane.
        staging: [slots, lanes of a layer, pages of a lane] pages of the arena.
        positions: [lanes, slots] logical positions of the slots; None if lanes are in order.
        page_positions: [lanes, pages of a lane] logical position of the first slot of each page.
    """

    group: str
    first: int
    layers: Sequence[HostSpace]
    staging: PageNumbers
    positions: NDArray[np.int32] | None = None
    page_positions: PageNumbers | None = None

    @property
    def columns(self) -> int:
        """Number of pages of a lane."""
        return int(self.staging.shape[2])

    @property
    def slots(self) -> int:
        """Number of layers whose pages the staging holds at a time."""
        return len(self.staging)
