"""Static batching: so many rows run to completion before the next ones begin."""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, PagedRule, Q
from quire.scheduler.batchers.phases import Phases, RunToEnd
from quire.scheduler.batchers.prefill_order import FirstCome


@dataclass(frozen=True, slots=True)
class Static(PagedRule, RunToEnd):
    """Rows that are done are idle until the last one is; answers are given as they end.

    Source: what `generate` of Transformers does with a batch, and the baseline of BATON.

    Differs from it: nothing is padded, and who gave way for want of memory comes back to its batch.
    On dense rows the batch's own forward reads the prompts, padded to the longest.
    """

    name = "static"

    shapes = True

    def make(self, state: BatchState) -> Batcher:
        """See `PagedRule`."""
        return Phases(state, self.num_rows(state.max_num_seqs), FirstCome())

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: as many as fit."""
        return list(view.waiting[: view.size])
