"""Vector shaping: a new prompt is read by the batch's own forward, in the row that is free.

Source: Cong et al., BATON, section 4.1. The others are padded to the prompt's length, and their
columns keep the hole for good. It is here to be measured: a slab with holes may outgrow its
capacity (SlabFull), and says so.
"""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchRule, BatchView
from quire.hf.dynamic.rules.registry import batch_rule


@batch_rule("baton")
class VectorShaping(BatchRule):
    """All free rows are filled at once; every row pays for the longest new prompt."""

    shapes = True

    def next_group(self, view: BatchView) -> list[Query]:
        """As many as there are free rows."""
        return list(view.waiting[: view.free])
