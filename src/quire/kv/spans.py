"""Many ranges of integers in one array."""

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32] | NDArray[np.int64]


def offsets(counts: Integers) -> NDArray[np.int64]:
    """0 .. counts[0]-1, then 0 .. counts[1]-1, and so on: int64 [counts.sum()]."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def spans(starts: Integers, counts: Integers) -> NDArray[np.int32]:
    """`counts[i]` integers from `starts[i]` on, range after range: int32 [counts.sum()]."""
    first: NDArray[np.int64] = np.repeat(starts.astype(np.int64), counts)
    numbers: NDArray[np.int32] = (first + offsets(counts)).astype(np.int32)
    return numbers
