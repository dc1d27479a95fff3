"""Interface between evictions and the offloaded pages of a sequence."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class LayerLoads(Protocol):
    """Access to the offloaded pages of a sequence one layer at a time, between steps."""

    def is_offloaded(self, row: int, group: str) -> bool:
        """Whether the first pages of a group's lanes are offloaded."""
        ...

    def read(self, row: int, group: str, layers: range) -> None:
        """Load the offloaded pages of layers into their staging pages, until the next read.

        Args:
            row: the sequence.
            group: name of the lane group.
            layers: indices of layers in the group; at most one if pages are offloaded.
        """
        ...

    def require_pages(self, row: int, group: str, kept: NDArray[np.bool_], copies: int = 0) -> None:
        """Check that all layers can be settled in turn, each cut before the next one is settled.

        Args:
            row: the sequence.
            group: name of the lane group.
            kept: [lanes, columns] pages of each lane after the cut.
            copies: private copies of pages in the arena that the cuts make.
        """
        ...

    def settle(self, row: int, group: str, layer: int, kept: NDArray[np.bool_]) -> None:
        """Load the offloaded pages of a layer, and give those that are kept pages of their own.

        The others remain in the staging pages until the next read. `require_pages` precedes it.
        """
        ...

    def forget(self, row: int, group: str) -> None:
        """Free the offloaded bytes of a group with settled layers, unless others use them."""
        ...
