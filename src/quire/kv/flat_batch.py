"""The shape of a flat batch: which row and which place in its chunk each token has."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import StepShape


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Rows and token counts of a step, and what follows from them alone.

    While the same sequences decode, step after step has the same batch: its arrays and tensors are
    made once. What changes from step to step (slots, positions) is not in here.

    Attributes:
        rows: [rows] table rows in the order of the flat batch, one-token rows first.
        shape: new tokens of each.
        token_row: [tokens] index into `rows`.
        token_offset: [tokens] place in the row's chunk.
        row_index: `rows` on the device.
    """

    rows: NDArray[np.int64]
    shape: StepShape
    token_row: NDArray[np.int64]
    token_offset: NDArray[np.int64]
    row_index: Tensor

    @classmethod
    def of(
        cls, rows: NDArray[np.int64], tokens: NDArray[np.int32], device: torch.device
    ) -> "FlatBatch":
        """Lay out the rows one behind the other."""
        rows = rows.copy()  # the caller may use its arrays again
        shape = StepShape.of(tokens.copy())
        token_row = np.repeat(np.arange(len(rows)), tokens)
        return cls(
            rows=rows,
            shape=shape,
            token_row=token_row,
            token_offset=np.arange(len(token_row)) - shape.starts[token_row],
            row_index=torch.from_numpy(rows).to(device),
        )

    def is_for(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> bool:
        """Whether these rows with these tokens have this batch."""
        return np.array_equal(self.rows, rows) and np.array_equal(self.shape.tokens, tokens)
