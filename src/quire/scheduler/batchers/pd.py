"""Separate prefill and decoding: similar prompts are prefilled together, then decode as a batch."""

from dataclasses import dataclass

from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, PagedRule, Q
from quire.scheduler.batchers.phases import Phases, RunToEnd
from quire.scheduler.batchers.prefill_order import SimilarLengths, similar_group


@dataclass(frozen=True, slots=True)
class PrefillDecode(PagedRule, RunToEnd):
    """Queries are prefilled in groups of similar length, and decode in the same order.

    Source: Cong et al., BATON, section 5.1, method "PD": without its vector embedding.

    On dense rows, batches are formed in the order of arrival: less padding in prefill than
    `static`, the same idle rows in decoding.

    Attributes:
        ahead: number of rows prefilled before any of them decodes; 0: one batch.
        window: maximum waiting requests searched for similar lengths.
    """

    name = "pd"

    ahead: int = 0
    window: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, ahead=self.ahead)
        check_at_least(1, window=self.window)

    def num_rows(self, max_num_seqs: int) -> int:
        return max(self.ahead, max_num_seqs)

    def make(self, state: BatchState) -> Batcher:
        order = SimilarLengths(state.waiting, state.max_num_seqs, self.window)
        return Phases(state, self.num_rows(state.max_num_seqs), order)

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: queries of similar length among those of the next batch."""
        batch = view.waiting[: view.free - len(view.ready)]
        return similar_group(batch, max(1, len(batch)), view.group_tokens)
