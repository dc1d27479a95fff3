"""Static batching: all rows of a batch finish before the next batch starts."""

from dataclasses import dataclass

from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, PagedRule, Q
from quire.scheduler.batchers.phases import Phases, RunToEnd
from quire.scheduler.batchers.prefill_order import FirstCome


@dataclass(frozen=True, slots=True)
class Static(PagedRule, RunToEnd):
    """Finished rows are idle until the last one finishes; each output is returned at its end.

    Source: `generate` of Transformers, and the baseline of BATON.

    Differs from them: there is no padding, and a preempted request resumes in its batch. On dense
    rows the batch's own forward prefills the prompts, padded to the longest.
    """

    name = "static"

    shapes = True

    def make(self, state: BatchState) -> Batcher:
        return Phases(state, self.num_rows(state.max_num_seqs), FirstCome())

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: as many queries as the batch has rows."""
        return list(view.waiting[: view.size])
