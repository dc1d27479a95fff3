"""Static batching: so many rows run to completion before the next ones begin."""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatcherRule, BatchState
from quire.scheduler.batchers.phases import Phases
from quire.scheduler.batchers.prefill_order import FirstCome


@dataclass(frozen=True, slots=True)
class Static(BatcherRule):
    """Rows that are done are idle until the last one is; answers are given as they end.

    Source: what `generate` of Transformers does with a batch, and the baseline of BATON.

    Differs from it: nothing is padded, and who gave way for want of memory comes back to its batch.
    """

    name = "static"

    def num_rows(self, max_num_seqs: int) -> int:
        """See `BatcherRule`."""
        return max_num_seqs

    def make(self, state: BatchState) -> Batcher:
        """See `BatcherRule`."""
        return Phases(state, self.num_rows(state.max_num_seqs), FirstCome())
