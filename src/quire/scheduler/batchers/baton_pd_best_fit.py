"""BATON-PD that inserts the longest prefilled query that is not longer than the longest row."""

from dataclasses import dataclass

from quire.policies.options import check_at_least
from quire.scheduler.batchers.base import Batcher, BatchState, BatchView, Q
from quire.scheduler.batchers.baton_pd import BatonPD
from quire.scheduler.batchers.insertion import BestFit, best_fit
from quire.scheduler.batchers.prefilled import PrefilledQueue


@dataclass(frozen=True, slots=True)
class BatonPDBestFit(BatonPD):
    """As `baton_pd`, but the query is chosen by length.

    On dense rows this reduces padding. If no query fits, the shortest is inserted. A query that
    `patience` later ones have overtaken is inserted next. Paged KV has no padding; there the rows
    of the batch keep similar lengths.

    Attributes:
        queue, tokens, prefill, hold, lead, window: see `BatonPD`.
        patience: maximum queries that may be inserted before the first of the queue.
    """

    name = "baton_pd_best_fit"

    min_ready = 3
    dense_options = ("patience",)

    patience: int = 8

    def __post_init__(self) -> None:
        BatonPD.__post_init__(self)  # not super(): `slots=True` creates a new class
        check_at_least(0, patience=self.patience)

    def make(self, state: BatchState) -> Batcher:
        options = self.queue_options(state.max_num_seqs)
        return PrefilledQueue(state, options, BestFit(self.patience))

    def choose(self, view: BatchView[Q]) -> Q | None:
        """See `DenseRule`: the best fit among the ready queries of the best priority."""
        first = BatonPD.choose(self, view)
        if first is None:
            return None
        equals = [query for query in view.ready if query.priority == first.priority]
        if max(query.number for query in (*equals, *view.live)) - first.number > self.patience:
            return first
        equals.sort(key=lambda query: query.number)
        fitting = best_fit(equals, lambda query: query.num_to_read, view.columns)
        return fitting or min(equals, key=lambda query: query.num_to_read)
