"""Prefill apart: prompts of similar length are read together, then the batch runs to completion.

Source: Cong et al., BATON, section 5.1, method "PD". The batches are made in the order of arrival.
"""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchRule, BatchView, similar_group
from quire.hf.dynamic.rules.registry import batch_rule


@batch_rule("pd")
class PrefillApart(BatchRule):
    """Less padding while reading, the same idle rows while decoding as `static`."""

    runs_to_end = True

    def open_rows(self, view: BatchView) -> int:
        """All, once no row goes on."""
        return 0 if view.live else view.size

    def next_group(self, view: BatchView) -> list[Query]:
        """Similar ones among those that make up the batch."""
        batch = view.waiting[: view.free - len(view.ready)]
        return similar_group(batch, max(1, len(batch)), view.group_tokens)
