"""Vector shaping: a new prompt is prefilled in the free row, in the batch's own forward.

The other rows are padded to the prompt's length, and these padded columns are never removed. The
rule is for comparison: a slab with padding may exceed its capacity, which raises `SlabFull`.
"""

from dataclasses import dataclass

from quire.scheduler.batchers.base import BatchView, DenseRule, Q


@dataclass(frozen=True, slots=True)
class Baton(DenseRule):
    """All free rows are filled at once; every row is padded to the longest new prompt.

    Source: Cong et al., BATON, section 4.1.
    """

    name = "baton"

    shapes = True

    def next_group(self, view: BatchView[Q]) -> list[Q]:
        """See `DenseRule`: as many queries as there are free rows."""
        return list(view.waiting[: view.free])
