"""The shape of a flat batch, and page tables as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import StepShape
from quire.kv.tables import LaneTable

# The shape of a flat batch: which row and which place in its chunk each token has.


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


# ---- device tables -------------------------------------------------------------------------------

# Page tables as tensors: the same memory on a CPU, a copy kept current by deltas on a device.


class DeviceTable:
    """The pages of a `LaneTable` as an int32 tensor [rows, lanes, capacity].

    On a CPU this is the table's own memory. On another device only entries that changed are
    copied; when the table has moved to larger memory it is copied whole once.
    """

    def __init__(self, table: LaneTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._version = -1
        self._pages = torch.empty(0, dtype=torch.int32)

    def current(self) -> Tensor:
        """The tensor, up to date with all bookkeeping done so far."""
        if self._version != self._table.version:
            # a tensor made inside inference mode could not be brought up to date outside of it
            with torch.inference_mode(mode=False):
                self._pages = torch.from_numpy(self._table.pages).to(self._device)
            self._version = self._table.version
            self._table.drain_changes()
        elif self._device.type != "cpu":
            self._apply(self._table.drain_changes())
        return self._pages

    def _apply(self, changed: NDArray[np.int64]) -> None:
        if len(changed):
            entries = torch.from_numpy(self._table.pages.reshape(-1)[changed]).to(self._device)
            index = torch.from_numpy(changed).to(self._device)
            self._pages.view(-1)[index] = entries
