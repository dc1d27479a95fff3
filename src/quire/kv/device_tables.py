"""Page tables as tensors: the same memory on a CPU, a copy kept current by deltas on a device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kv.tables import LaneTable


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
