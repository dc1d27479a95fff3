"""Prefill of a group of prompts, whole or in chunks, in the batch's rows or in a separate slab."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.slab_model import SlabModel
from quire.kv.dense.in_place import SlabRows
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.slab import DenseSlab


class Prefill:
    """A prefill in progress; prompts start at column 0, shorter prompts have pads at their end.

    Args:
        model: runs the prefill.
        queries: the group.
        slab: destination of their KV.

    Attributes:
        queries: the group.
        columns: columns of the longest prompt.
        logits: logits of each query's last token; set when the token was processed.
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
        """Whether the prefill is complete."""
        return self.columns_done == self.columns

    @property
    def columns_done(self) -> int:
        """Columns processed so far."""
        return self._slab.window.hi - self._first

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts, pads counted."""
        return self.columns * len(self.queries)

    def advance(self, tokens: int) -> int:
        """Process at most `tokens` tokens, pads counted, but at least one column.

        Returns:
            Number of processed columns.
        """
        first = self.columns_done
        columns = min(max(1, tokens // len(self.queries)), self.columns - first)
        chunk = [ids[first : first + columns] for ids in self._token_ids]
        ends = {
            query: len(ids) - 1 - first
            for query, ids in zip(self.queries, self._token_ids, strict=True)
            if first < len(ids) <= first + columns
        }
        wanted = sorted(set(ends.values()))
        logits = self._model.prefill(self._slab, chunk, columns, wanted)
        for row, query in enumerate(self.queries):
            if query in ends:
                self.logits[query] = logits[row, wanted.index(ends[query])].clone()
        return columns

    def finish(self) -> None:
        """Assign each query its KV, unless the prefill was in the batch's rows."""
        if isinstance(self._slab, SlabRows):
            self._slab.register([len(ids) for ids in self._token_ids])
            return
        for query, kv in zip(self.queries, self._slab.split(), strict=True):
            query.kv = kv

    def drop(self) -> None:
        """Free the separate slab."""
        if isinstance(self._slab, DenseSlab):
            self._slab.free()


def start_in_separate_slab(model: SlabModel, queries: Sequence[Query], meter: ByteMeter) -> Prefill:
    """Start a prefill in a separate slab."""
    columns = max(query.num_to_read for query in queries)
    return Prefill(model, queries, DenseSlab(model.shape, len(queries), columns, meter=meter))


def prefill_bytes(model: SlabModel, queries: Sequence[Query]) -> int:
    """Peak bytes of a group's prefill and split: its slab, and one layer of it twice."""
    columns = max(query.num_to_read for query in queries)
    return model.shape.growing_bytes(len(queries), columns)
