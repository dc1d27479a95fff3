"""Where a lane group's important tokens are, and how one gets a record."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPages, write_codes
from quire.kernels.token_precision import PromotedPages, record_of, records_of
from quire.kv.flat_batch import DeviceTable
from quire.kv.full_precision import FullPrecisionBuffer
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.kv.tables import LaneTable
from quire.layout.token_precision import PromotedTokens


@dataclass(frozen=True, slots=True)
class PromotedBuffer:
    """Where records of a lane group are.

    Attributes:
        tokens: which they are.
        coded: what encodes and decodes them.
        marks: [page, record] whose they are: position + 1; 0 for nobody's.
        table: which pages a row has, one a lane.
        device_table: the same as a tensor.
    """

    tokens: PromotedTokens
    coded: CodedPages
    marks: Tensor
    table: LaneTable
    device_table: DeviceTable

    def pages(self) -> PromotedPages:
        """What attention of a layer gets."""
        return PromotedPages(self.coded, self.marks, self.device_table.current())

    def records(self, row: int, lanes: slice, positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """Which record a row has of each token, [lanes, slots]; -1 where it has none.

        Args:
            row: the sequence.
            lanes: some of its lanes.
            positions: [lanes, slots] of the tokens in them; -1 for none.
        """
        marks = self.marks[self._pages(row)[lanes]]
        return records_of(marks, torch.from_numpy(positions).to(marks.device)).cpu().numpy()

    def put(
        self,
        row: int,
        place: tuple[NDArray[np.int64], NDArray[np.int64]],
        positions: NDArray[np.integer],
        kept: FullPrecisionBuffer,
    ) -> None:
        """Encode tokens that are still kept as the model made them.

        Args:
            row: the sequence.
            place: lane and record of each token.
            positions: where it is in the sequence.
            kept: where it is kept.
        """
        device = self.marks.device
        lane, record = (torch.from_numpy(index).to(device) for index in place)
        position = torch.from_numpy(np.asarray(positions, dtype=np.int64)).to(device)
        pages = self._pages(row)[lane]
        full_precision_pages = torch.from_numpy(kept.table.pages[row, :, 0].astype(np.int64)).to(
            device
        )
        made = full_precision_pages[lane], record_of(kept.tokens, position)
        planes = kept.views.key, kept.views.value
        for side, plane in zip((self.coded.key, self.coded.value), planes, strict=True):
            assert plane is not None, "keys and values are kept"
            write_codes(side, pages[:, None], record[:, None], plane[made[0], :, made[1]])
        self.marks[pages, record] = (position + 1).to(self.marks.dtype)

    def _pages(self, row: int) -> Tensor:
        pages = self.table.pages[row, :, 0].astype(np.int64)
        return torch.from_numpy(pages).to(self.marks.device)


def promoted_buffers(
    memory: KVMemory, store: PageStore, tables: Mapping[str, DeviceTable]
) -> dict[str, PromotedBuffer]:
    """Where records of each lane group are, by its name."""
    places = {}
    for group in memory.layout.groups:
        if group.promoted is None:
            continue
        views = store.views(group.page_class)
        assert views.coded is not None, "records hold codes"
        assert views.positions is not None, "records say whose they are"
        places[group.promoted.of] = PromotedBuffer(
            tokens=group.promoted,
            coded=views.coded,
            marks=views.positions,
            table=memory.tables[group.name],
            device_table=tables[group.name],
        )
    return places
