"""Mixed precision: records of promoted tokens, which hold what their codes lost."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPages, CodedPlanes, write_codes
from quire.kernels.token_precision import PromotedPages, records_of
from quire.kv.flat_batch import DeviceTable
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.kv.tables import LaneTable
from quire.layout.token_precision import PromotedTokens


@dataclass(frozen=True, slots=True)
class PromotedBuffer:
    """Pages that hold the promoted tokens of a lane group."""

    tokens: PromotedTokens  # number of promoted tokens
    coded: CodedPages
    marks: Tensor  # [page, record] position + 1 of the token; 0 for a free record
    table: LaneTable  # one page per lane
    device_table: DeviceTable  # `table` as a tensor

    def pages(self) -> PromotedPages:
        return PromotedPages(self.coded, self.marks, self.device_table.current())

    def records(self, row: int, lanes: slice, positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """The record of each token at positions [lanes, slots]; -1 for tokens without one."""
        marks = self.marks[self._pages(row)[lanes]]
        return records_of(marks, torch.from_numpy(positions).to(marks.device)).cpu().numpy()

    def put(
        self,
        row: int,
        place: tuple[NDArray[np.int64], NDArray[np.int64]],
        positions: NDArray[np.integer],
        lost: tuple[Tensor, Tensor],
    ) -> None:
        """Encode what codes lost, [token, head, head_dim], at (lane, record) of each token."""
        device = self.marks.device
        lane, record = (torch.from_numpy(index).to(device) for index in place)
        position = torch.from_numpy(np.asarray(positions, dtype=np.int64)).to(device)
        pages = self._pages(row)[lane]
        for side, residual in zip((self.coded.key, self.coded.value), lost, strict=True):
            write_codes(side, pages[:, None], record[:, None], residual)
        self.marks[pages, record] = (position + 1).to(self.marks.dtype)

    def encode_again(
        self,
        side: CodedPlanes,
        pages: Tensor,
        positions: Tensor,
        lost: Float[Tensor, "page head token head_dim"],
    ) -> None:
        """Encode what new codes of whole pages lost, for the tokens that have records."""
        record = records_of(self.marks[pages], positions)
        page, token = (record >= 0).nonzero(as_tuple=True)
        if len(page):
            residual = lost[page, :, token]
            write_codes(side, pages[page][:, None], record[page, token][:, None], residual)

    def _pages(self, row: int) -> Tensor:
        pages = self.table.pages[row, :, 0].astype(np.int64)
        return torch.from_numpy(pages).to(self.marks.device)


def promoted_buffers(
    memory: KVMemory, store: PageStore, tables: Mapping[str, DeviceTable]
) -> dict[str, PromotedBuffer]:
    """Return the promoted-token buffer of each lane group that has one, by the group's name."""
    places = {}
    for group in memory.layout.groups:
        if group.promoted is None:
            continue
        views = store.views(group.page_class)
        assert views.coded is not None, "records hold codes"
        assert views.positions is not None, "records hold the positions of their tokens"
        assert group.of is not None, "promoted tokens are of a group"
        places[group.of] = PromotedBuffer(
            tokens=group.promoted,
            coded=views.coded,
            marks=views.positions,
            table=memory.tables[group.name],
            device_table=tables[group.name],
        )
    return places
