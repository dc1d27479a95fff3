"""The ranks that share one model: each has some heads of every layer."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@runtime_checkable  # for the shape checks in tests
class TensorGroup(Protocol):
    """Collectives of the ranks of one model. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, bit-identical on every rank.

        Args:
            tensor: of the same shape and type on all ranks; may be overwritten.
        """
        ...

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of the ranks."""

    def union(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask that is True where the mask of any rank is."""

    def least(self, number: int) -> int:
        """Return the smallest number of any rank."""

    def meet(self) -> None:
        """Wait until all ranks have called this. For phases of very different duration: loading."""
        ...


class OneRank:
    """The group of a model that runs in one process: all collectives return their argument."""

    rank, size = 0, 1

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def union(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return mask

    def least(self, number: int) -> int:
        return number

    def meet(self) -> None: ...


ONE_RANK = OneRank()
