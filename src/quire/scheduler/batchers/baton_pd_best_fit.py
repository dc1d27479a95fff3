"""BATON-PD that inserts the longest prefilled query that makes the batch no longer than it is."""

from dataclasses import dataclass

from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import Batcher, BatchState
from quire.scheduler.batchers.baton_pd import BatonPD
from quire.scheduler.batchers.insertion import BestFit
from quire.scheduler.batchers.prefilled import PrefilledQueue


@dataclass(frozen=True, slots=True)
class BatonPDBestFit(BatonPD):
    """As `baton_pd`, with another choice from its queue.

    On a dense slab this saves padding. In pages nothing is padded: rows of alike lengths remain.

    Attributes:
        queue, tokens, prefill, hold, lead, window: as those of `baton_pd`.
        patience: queries that may be inserted before the one that is first in the queue.
    """

    name = "baton_pd_best_fit"

    patience: int = 8

    def __post_init__(self) -> None:
        BatonPD.__post_init__(self)  # not super(): slots make another class of this one
        check_at_least(0, patience=self.patience)

    def make(self, state: BatchState) -> Batcher:
        """See `BatcherRule`."""
        options = self.queue_options(state.max_num_seqs)
        return PrefilledQueue(state, options, BestFit(self.patience))
