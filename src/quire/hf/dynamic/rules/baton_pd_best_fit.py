"""Vector embedding where the query that fits best enters: the longest that widens no row."""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchView
from quire.hf.dynamic.rules.baton_pd import VectorEmbedding
from quire.hf.dynamic.rules.registry import batch_rule

_MOST_OVERTAKEN = 8


@batch_rule("baton_pd_best_fit")
class BestFit(VectorEmbedding):
    """Of the prefilled queue the longest within the columns there are, else the shortest.

    Who was overtaken by 8 later ones enters next.
    """

    least_ready = 3

    def choose(self, view: BatchView) -> Query | None:
        """The best fit among the ready of the highest priority."""
        first = super().choose(view)
        if first is None:
            return None
        equals = [query for query in view.ready if query.priority == first.priority]
        if max(query.number for query in (*equals, *view.live)) - first.number > _MOST_OVERTAKEN:
            return first
        fitting = [query for query in equals if query.num_to_read <= view.columns]
        if fitting:
            return max(fitting, key=lambda query: (query.num_to_read, -query.number))
        return min(equals, key=lambda query: (query.num_to_read, query.number))
