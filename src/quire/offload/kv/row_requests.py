"""Requests by row: the properties of sequences that KV recompute needs."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.peaks import can_offload_request
from quire.scheduler.request import Request


class RowRequests:
    """Implements `quire.offload.recompute.kv_recompute.Tokens` over the running requests.

    Args:
        fraction: fraction (0 to 1) of a sequence's tokens that may be recomputed, from the first.
        running: requests that hold KV; the scheduler's own list.
    """

    def __init__(self, fraction: int | float, running: Sequence[Request]) -> None:
        self._fraction, self._running = fraction, running

    def token_ids(self, row: int, positions: NDArray[np.int64]) -> list[int]:
        """Token ids at these positions."""
        ids = self._of(row).token_ids(0, int(positions.max()) + 1)
        return [ids[position] for position in positions.tolist()]

    def rope_variant(self, row: int) -> int:
        """RoPE scaling variant of the sequence."""
        return self._of(row).spec.rope_variant

    def inputs_until(self, row: int) -> int:
        """First slot that is never recomputed; 0 if no slot is."""
        request = self._of(row)
        return (
            int(-(-request.final_tokens * self._fraction // 1))
            if can_offload_request(request)
            else 0
        )

    def _of(self, row: int) -> Request:
        return next(request for request in self._running if request.memory.row == row)
