"""Reading prompts: a group at a time, whole or in chunks, in its rows or apart from the batch."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.in_place import SlabRows
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.slab import DenseSlab


class Prefill:
    """Prompts that are being read, each from column 0 on, pads behind the shorter ones.

    Args:
        model: reads them.
        queries: the group.
        slab: where their KV comes to lie.

    Attributes:
        queries: as given.
        columns: of the longest.
        logits: of each query's last token, once it was read.
    """

    def __init__(
        self, model: SlabModel, queries: Sequence[Query], slab: DenseSlab | SlabRows
    ) -> None:
        self.queries = list(queries)
        self._token_ids = [query.to_read for query in queries]
        self.columns = max(map(len, self._token_ids))
        self.logits: dict[Query, Float[Tensor, " vocab"]] = {}
        self._model = model
        self._slab, self._first = slab, slab.window.hi

    @property
    def done(self) -> bool:
        """Whether all was read."""
        return self.columns_read == self.columns

    @property
    def columns_read(self) -> int:
        """Columns read so far."""
        return self._slab.window.hi - self._first

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
        """Give each query its KV, unless it was read where it stays."""
        if isinstance(self._slab, SlabRows):
            self._slab.hold([len(ids) for ids in self._token_ids])
            return
        for query, kv in zip(self.queries, self._slab.split(), strict=True):
            query.kv = kv

    def drop(self) -> None:
        """Give back what lies beside the batch."""
        if isinstance(self._slab, DenseSlab):
            self._slab.free()


def read_apart(model: SlabModel, queries: Sequence[Query], meter: ByteMeter) -> Prefill:
    """Begin to read prompts beside the batch."""
    columns = max(query.num_to_read for query in queries)
    return Prefill(model, queries, DenseSlab(model.shape, len(queries), columns, meter=meter))


def prefill_bytes(model: SlabModel, queries: Sequence[Query]) -> int:
    """Bytes while a group is read and taken apart: its slab, and one layer of it twice."""
    columns = max(query.num_to_read for query in queries)
    return model.shape.growing_bytes(len(queries), columns)
