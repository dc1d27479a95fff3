"""Sampled tokens on the device whose values the CPU has not read yet."""

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
