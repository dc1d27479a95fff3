"""How much attention changes the residual stream: sum of cosines, and how many tokens."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from quire.kv.flat_batch import FlatBatch
from quire.kv.statistics.pages import Records, StatisticPages


class ShiftStep:
    """The shift of one lane group's layers in one step. Not made where no row has it.

    Args:
        place: an `AttentionShift`.
        batch: the step.
    """

    def __init__(self, place: StatisticPages, batch: FlatBatch) -> None:
        rows = np.flatnonzero(place.active_rows(batch))
        self._records = Records.of(place, batch.rows[rows], np.zeros(len(rows), dtype=np.int64))
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads
        device = place.numbers.device
        self._num_rows = len(batch.rows)
        self._row = torch.from_numpy(batch.token_row).to(device)
        self._rows = torch.from_numpy(rows).to(device)
        self._tokens = torch.from_numpy(batch.shape.tokens).to(device).float()

    def note(self, layer: int, cosine: Float[Tensor, " num_tokens"]) -> None:
        """Add a layer's cosines; `layer` is counted inside the group."""
        sums = torch.zeros(self._num_rows, device=cosine.device).index_add_(0, self._row, cosine)
        record = torch.stack([sums, self._tokens], dim=1)[self._rows]
        self._records.add(layer, record[:, None].expand(-1, self._num_kv_heads, -1))
