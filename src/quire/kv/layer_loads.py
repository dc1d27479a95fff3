"""Interface between evictions and the offloaded pages of a sequence."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@runtime_checkable
class LayerLoads(Protocol):
    """Access to the offloaded pages of a sequence one layer at a time, between steps."""

    def is_offloaded(self, row: int, group: str) -> bool:
        """Whether the first pages of a group's lanes are offloaded."""

    def read(self, row: int, group: str, layers: range) -> None:
        """Load offloaded pages of layers (at most one) into staging pages, until the next read."""
        ...

    def require_pages(self, row: int, group: str, kept: NDArray[np.bool_], copies: int = 0) -> None:
        """Refuse (OutOfPages) layers that cannot be settled in turn; kept is [lanes, columns]."""
        ...

    def settle(self, row: int, group: str, layer: int, kept: NDArray[np.bool_]) -> None:
        """Load the offloaded pages of a layer, and give those that are kept pages of their own.

        The others remain in the staging pages until the next read. `require_pages` precedes it.
        """
        ...

    def forget(self, row: int, group: str) -> None:
        """Free the offloaded bytes of a group with settled layers, unless others use them."""
        ...
