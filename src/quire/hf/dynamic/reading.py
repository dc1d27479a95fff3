"""Reading prompts apart from the batch: a group at a time, whole or in chunks."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.slab import DenseSlab


class Reading:
    """Prompts that are being read, each from column 0 on, pads behind the shorter ones.

    Args:
        model: reads them.
        queries: the group.
        meter: counts their KV.

    Attributes:
        queries: as given.
        columns: of the longest.
        logits: of each query's last token, once it was read.
    """

    def __init__(self, model: SlabModel, queries: Sequence[Query], meter: ByteMeter) -> None:
        self.queries = list(queries)
        self._token_ids = [query.to_read for query in queries]
        self.columns = max(map(len, self._token_ids))
        self.logits: dict[Query, Float[Tensor, " vocab"]] = {}
        self._model = model
        self._slab = DenseSlab(model.shape, len(queries), self.columns, meter=meter)

    @property
    def done(self) -> bool:
        """Whether all was read."""
        return self.columns_read == self.columns

    @property
    def columns_read(self) -> int:
        """Columns read so far."""
        return self._slab.window.hi

    @property
    def num_tokens(self) -> int:
        """Of all prompts, pads counted."""
        return self.columns * len(self.queries)

    def advance(self, tokens: int) -> int:
        """Read on, at most so many tokens with pads counted, but always a column.

        Returns:
            Columns that were read.
        """
        first = self.columns_read
        columns = min(max(1, tokens // len(self.queries)), self.columns - first)
        chunk = [ids[first : first + columns] for ids in self._token_ids]
        ends = {
            query: len(ids) - 1 - first
            for query, ids in zip(self.queries, self._token_ids, strict=True)
            if first < len(ids) <= first + columns
        }
        wanted = sorted(set(ends.values()))
        logits = self._model.read(self._slab, chunk, columns, wanted)
        for row, query in enumerate(self.queries):
            if query in ends:
                self.logits[query] = logits[row, wanted.index(ends[query])].clone()
        return columns

    def finish(self) -> None:
        """Give each query its KV."""
        for query, kv in zip(self.queries, self._slab.split(), strict=True):
            query.kv = kv


def reading_bytes(model: SlabModel, queries: Sequence[Query]) -> int:
    """Bytes while a group is read and taken apart: its slab, and one layer of it twice."""
    columns = max(query.num_to_read for query in queries)
    return model.shape.growing_bytes(len(queries), columns)
