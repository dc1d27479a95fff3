"""Who runs in which row: what making keys and values again has to know of sequences."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.scheduler.admission.need import can_offload_request
from quire.scheduler.request import Request


class RowRequests:
    """Implements `quire.offload.recompute.kv_recompute.Tokens` over the requests that run.

    Args:
        part: of a sequence's tokens that may ever be made again, from the first.
        running: those who run; the scheduler's own list.
    """

    def __init__(self, part: int | float, running: Sequence[Request]) -> None:
        self._part, self._running = part, running

    def token_ids(self, row: int, positions: NDArray[np.int64]) -> list[int]:
        """Tokens at some positions."""
        ids = self._of(row).token_ids(0, int(positions.max()) + 1)
        return [ids[position] for position in positions.tolist()]

    def rope_variant(self, row: int) -> int:
        """Of the sequence."""
        return self._of(row).spec.rope_variant

    def inputs_until(self, row: int) -> int:
        """Slots from this one on are never made again; 0: none is."""
        request = self._of(row)
        return (
            int(-(-request.final_tokens * self._part // 1)) if can_offload_request(request) else 0
        )

    def _of(self, row: int) -> Request:
        return next(request for request in self._running if request.memory.row == row)
