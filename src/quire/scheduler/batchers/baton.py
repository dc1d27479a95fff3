"""Vector shaping: a new prompt is read by the batch's own forward, in the row that is free.

The others are padded to the prompt's length, and their columns keep the hole for good. It is here
to be measured: a slab with holes may outgrow its capacity (SlabFull), and says so.
"""

from dataclasses import dataclass

from quire.scheduler.batchers.base import BatchView, DenseRule, Q


@dataclass(frozen=True, slots=True)
class Baton(DenseRule):
    """All free rows are filled at once; every row pays for the longest new prompt.

    Source: Cong et al., BATON, section 4.1.
    """

    name = "baton"

    shapes = True

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: as many as there are free rows."""
        return list(view.waiting[: view.free])
