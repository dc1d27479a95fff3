"""Prefill and decoding apart: prompts of similar length are read ahead, then batches are static."""

from dataclasses import dataclass

from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import Batcher, BatcherRule, BatchState
from quire.scheduler.batchers.phases import Phases
from quire.scheduler.batchers.prefill_order import SimilarLengths


@dataclass(frozen=True, slots=True)
class PrefillDecode(BatcherRule):
    """Queries are prefilled in groups of similar length, and decode in the order of that.

    Source: the P/D arm of BATON, without its vector embedding.

    Attributes:
        ahead: rows that are prefilled before any of them decodes; 0: a batch.
        window: waiting requests among which those of similar length are looked for.
    """

    name = "pd"

    ahead: int = 0
    window: int = 64

    def __post_init__(self) -> None:
        check_at_least(0, ahead=self.ahead)
        check_at_least(1, window=self.window)

    def num_rows(self, max_num_seqs: int) -> int:
        """See `BatcherRule`."""
        return max(self.ahead, max_num_seqs)

    def make(self, state: BatchState) -> Batcher:
        """See `BatcherRule`."""
        order = SimilarLengths(state.waiting, state.max_num_seqs, self.window)
        return Phases(state, self.num_rows(state.max_num_seqs), order)
