"""Vector embedding: prompts of similar length are read apart, and enter rows without padding.

Source: Cong et al., BATON, section 4.2.
"""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchRule, BatchView, similar_group
from quire.hf.dynamic.rules.registry import batch_rule

_READ_TOGETHER_SHARE = 4


@batch_rule("baton_pd")
class VectorEmbedding(BatchRule):
    """A short queue of prefilled queries; the first in line enters."""

    reads_ahead = True

    def next_group(self, view: BatchView) -> list[Query]:
        """The first in line and similar ones: those there are rows for, or a quarter of a batch.

        More would be read in fewer forwards, and lie in memory for longer.
        """
        most = max(1, view.free, view.size // _READ_TOGETHER_SHARE)
        return similar_group(view.waiting, most, view.group_tokens)
