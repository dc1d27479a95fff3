"""BATON-PD that inserts the longest prefilled query that makes the batch no longer than it is."""

from dataclasses import dataclass

from quire.engine.batchers.base import Batcher, BatcherRule, BatchState
from quire.engine.batchers.baton_pd import BatonPD
from quire.engine.batchers.insertion import BestFit
from quire.engine.batchers.prefilled import PrefilledQueue
from quire.policies.options import check_at_least


@dataclass(frozen=True, slots=True)
class BatonPDBestFit(BatcherRule):
    """As `baton_pd`, with another choice from its queue.

    On a dense slab this saves padding. In pages nothing is padded: rows of alike lengths remain.

    Attributes:
        queue, tokens, prefill, hold, lead, window: as those of `baton_pd`.
        patience: queries that may be inserted before the one that is first in the queue.
    """

    name = "baton_pd_best_fit"

    queue: int = 0
    tokens: int = 256
    prefill: str = "async"
    hold: str = "device"
    lead: int = 4
    window: int = 64
    patience: int = 8

    def __post_init__(self) -> None:
        check_at_least(0, patience=self.patience)
        self._first_prefilled()  # refuses the options of the queue

    def _first_prefilled(self) -> BatonPD:
        return BatonPD(
            queue=self.queue,
            tokens=self.tokens,
            prefill=self.prefill,
            hold=self.hold,
            lead=self.lead,
            window=self.window,
        )

    @property
    def holds_on_host(self) -> bool:
        """See `BatcherRule`."""
        return self.hold == "host"

    def num_rows(self, max_running: int) -> int:
        """See `BatcherRule`."""
        return self._first_prefilled().num_rows(max_running)

    def make(self, state: BatchState) -> Batcher:
        """See `BatcherRule`."""
        options = self._first_prefilled().queue_options(state.max_running)
        return PrefilledQueue(state, options, BestFit(self.patience))
