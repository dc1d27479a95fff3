"""The shape of a flat batch, its place in a step, and page tables as tensors."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import StepShape
from quire.kernels.device_copies import to_device
from quire.kv.tables import LaneTable

# The shape of a flat batch: the row of each token and its offset in the row's chunk.


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Rows and token counts of a step, and the index arrays derived from them.

    While the same sequences decode, consecutive steps have the same batch, so its arrays and
    tensors are built once. Data that changes in every step (slots, positions) is kept elsewhere.
    """

    rows: NDArray[np.int64]  # [rows] table rows, one-token rows first
    shape: StepShape  # new tokens of each row
    token_row: NDArray[np.int64]  # [tokens] index into `rows`
    token_offset: NDArray[np.int64]  # [tokens] offset in the row's chunk
    row_index: Tensor  # `rows` on the device

    @classmethod
    def of(
        cls, rows: NDArray[np.int64], tokens: NDArray[np.int32], device: torch.device
    ) -> "FlatBatch":
        rows = rows.copy()  # the caller may reuse its arrays
        shape = StepShape.of(tokens.copy())
        token_row = np.repeat(np.arange(len(rows)), tokens)
        return cls(
            rows=rows,
            shape=shape,
            token_row=token_row,
            token_offset=np.arange(len(token_row)) - shape.starts[token_row],
            row_index=to_device(rows, device),
        )

    def is_for(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> bool:
        return np.array_equal(self.rows, rows) and np.array_equal(self.shape.tokens, tokens)


@dataclass(frozen=True, slots=True)
class StepPart:
    """The place of a batch in a step of several batches, which run layer by layer."""

    number: int = 0  # index of the batch in the step
    count: int = 1  # batches that share a layer


WHOLE_STEP = StepPart()


@dataclass(frozen=True, slots=True)
class Scoring:
    """The tokens of a step are a part of a scoring pass; see `quire.layout.statistics`.

    Attributes:
        begins: whether they are the first of the pass: numbers of all slots are overwritten.
    """

    begins: bool


# Page tables as tensors: shared memory on a CPU; on a device, a copy updated by deltas.


class DeviceTable:
    """The pages of a `LaneTable` as an int32 tensor [rows, lanes, capacity].

    On a CPU the tensor is the table's own memory. On another device only changed entries are
    copied; after the table has been reallocated, the whole table is copied once.
    """

    def __init__(self, table: LaneTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._version = -1
        self._pages = torch.empty(0, dtype=torch.int32)

    def current(self) -> Tensor:
        """Return the tensor after applying all table changes so far."""
        if self._version != self._table.version:
            # a tensor created in inference mode could not be updated outside of it
            with torch.inference_mode(mode=False):
                self._pages = to_device(self._table.pages, self._device)
            self._version = self._table.version
            self._table.drain_changes()
        elif self._device.type != "cpu":
            changed = self._table.drain_changes()
            if len(changed):
                entries = self._table.pages.reshape(-1)[changed]
                index, pages = to_device(np.stack([changed, entries]), self._device)
                self._pages.view(-1)[index] = pages.int()
        return self._pages
