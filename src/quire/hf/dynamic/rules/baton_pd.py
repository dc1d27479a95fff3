"""Vector embedding: prompts of similar length are read apart, and enter rows without padding.

Source: Cong et al., BATON, section 4.2.
"""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchRule, BatchView, similar_group
from quire.hf.dynamic.rules.registry import batch_rule

_MOST_READ_AHEAD = 4


@batch_rule("baton_pd")
class VectorEmbedding(BatchRule):
    """A short queue of prefilled queries; the first in line enters."""

    reads_ahead = True

    def next_group(self, view: BatchView) -> list[Query]:
        """The first in line and similar ones: those there are rows for, and a few to come."""
        most = max(_MOST_READ_AHEAD, view.free)
        return similar_group(view.waiting, most, view.group_tokens)
