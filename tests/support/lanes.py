"""One layer's pages with random numbers, everything that is not live poisoned with NaN."""

import numpy as np
import torch

from quire.kernels.backend import LaneSlots, LayerPages, StepShape


class Lanes:
    """Lanes of several rows over scattered pages.

    Args:
        tokens: new tokens of each row, one-token rows first.
        slots: live slots [rows][lanes], new ones included.
        window: slots behind the window of the oldest new token are poisoned too.
    """

    def __init__(
        self, *, tokens, slots, heads, head_dim, page_tokens, dtype, window=None, seed=0
    ) -> None:
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.tokens = np.asarray(tokens, dtype=np.int32)
        self.slots = np.asarray(slots, dtype=np.int32)
        self.window, self.dtype, self.generator = window, dtype, generator
        rows, lanes = self.slots.shape
        columns = -(-int(self.slots.max()) // page_tokens)
        num_pages = rows * lanes * columns
        arena = torch.full((num_pages, 2, heads, page_tokens, head_dim), float("nan"), dtype=dtype)
        table = torch.from_numpy(rng.permutation(num_pages).astype(np.int32))
        self.table = table.view(rows, lanes, columns)
        for row, lane in np.ndindex(rows, lanes):
            slot = self._seen(row, lane)
            page = self.table[row, lane][slot // page_tokens].long()
            vectors = torch.randn(len(slot), 2, heads, head_dim, generator=generator).to(dtype)
            arena[page, :, :, slot % page_tokens] = vectors
            if len(slot):  # pages that no query sees are gone
                self.table[row, lane, : int(slot[0]) // page_tokens] = -1
                self.table[row, lane, int(slot[-1]) // page_tokens + 1 :] = -1
        self.pages = LayerPages(
            key=arena[:, 0],
            value=arena[:, 1],
            table=self.table,
            rows=torch.arange(rows),
            first_lane=0,
            num_lanes=lanes,
        )

    def _seen(self, row, lane):
        slots, oldest = int(self.slots[row, lane]), int(self.slots[row, lane] - self.tokens[row])
        first = 0 if self.window is None else max(0, oldest + 1 - self.window)
        return torch.arange(first, slots)

    def query(self, group):
        """Random queries of the flat batch."""
        heads = self.pages.num_lanes * self.pages.key.shape[1] * group
        shape = (int(self.tokens.sum()), heads, self.pages.key.shape[3])
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def fresh(self):
        """Keys and values of the flat batch, as computed by the layer."""
        planes = (self.pages.key, self.pages.value)
        rows = range(len(self.tokens))
        return tuple(torch.cat([self._newest(plane, row) for row in rows]) for plane in planes)

    def _newest(self, plane, row):
        heads = []
        for lane in range(self.pages.num_lanes):
            slots, tokens = int(self.slots[row, lane]), int(self.tokens[row])
            slot = torch.arange(slots - tokens, slots)
            page = self.table[row, lane][slot // self.pages.page_tokens].long()
            heads.append(plane[page, :, slot % self.pages.page_tokens])
        return torch.cat(heads, dim=1)

    def attend(self, backend, query, math, *, column_sums=None):
        """Output of a backend for these lanes."""
        step = StepShape.of(self.tokens)
        slot_bytes = self.pages.key[0, :, 0].nbytes * 2
        lanes = LaneSlots(self.slots, self.window)
        plan = backend.plan(step, lanes, self.pages.page_tokens, slot_bytes)
        return backend.attend(plan, self.pages, math, query, self.fresh(), column_sums=column_sums)

    def attend_with_sums(self, backend, query, math):
        """The output, and the column sums [rows, num_heads, slots]."""
        sums = torch.zeros(len(self.tokens), query.shape[1], int(self.slots.max()))
        return self.attend(backend, query, math, column_sums=sums), sums
