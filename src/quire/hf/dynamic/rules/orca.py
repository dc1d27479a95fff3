"""Iteration level: whoever is first in line takes a row the moment it is free.

Source: Yu et al. 2022, Orca. On dense rows its prompt is read by itself and embedded before the
step; there is no padding and no queue, and the other rows wait while it is read.
"""

from quire.hf.dynamic.query import Query
from quire.hf.dynamic.rules.base import BatchRule, BatchView
from quire.hf.dynamic.rules.registry import batch_rule


@batch_rule("orca")
class Orca(BatchRule):
    """One prompt at a time, when there is a row for it."""

    def next_group(self, view: BatchView) -> list[Query]:
        """The first in line."""
        return list(view.waiting[:1])
