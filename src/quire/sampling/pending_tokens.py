"""Sampled tokens that the CPU has not read yet, and their copies to the inputs of a forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from torch import Tensor

from quire.kernels.device_copies import to_device
from quire.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """The tokens of a step in flight, as inputs of the next step."""

    token_ids: Int[Tensor, " rows"]  # [rows] on the device
    rows: Mapping[Request, int]  # of each request

    def write(
        self, inputs: Int[Tensor, " num_tokens"], places: Sequence[int], rows: Sequence[int]
    ) -> None:
        """Overwrite token ids at `places` on the device, without waiting for it."""
        index = to_device(np.array([places, rows], dtype=np.int64), inputs.device)
        inputs.index_copy_(0, index[0], self.token_ids.index_select(0, index[1]))


class InputTokens:
    """Token ids of a flat batch; the place of a pending token holds 0 until `write_pending`."""

    def __init__(self, pending: PendingTokens | None) -> None:
        self.token_ids: list[int] = []
        self._pending = pending
        self._places: list[int] = []
        self._rows: list[int] = []

    def add(self, request: Request, start: int, tokens: int) -> None:
        """Add tokens of a request from position `start` on; only the last one may be pending."""
        known = request.token_ids(start, start + tokens)
        self.token_ids += known
        if len(known) < tokens:
            assert self._pending is not None, "the plan has the pending tokens"
            self._places.append(len(self.token_ids))
            self._rows.append(self._pending.rows[request])
            self.token_ids.append(0)

    def write_pending(self, inputs: Tensor) -> None:
        """Overwrite pending tokens in `inputs` [places], and the padding with the first one."""
        if self._pending is None or not self._places:
            return
        padding = range(len(self.token_ids), len(inputs)) if self._places[0] == 0 else ()
        places = [*self._places, *padding]
        rows = [*self._rows, *(self._rows[0] for _ in padding)]
        self._pending.write(inputs, places, rows)
