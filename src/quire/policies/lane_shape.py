"""What of a model evicts, in numbers: how many lanes, and what their pages take."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneShape:
    """What of a model evicts: the layers without a sliding window.

    Attributes:
        num_layers: how many.
        heads: KV heads of each.
        page_tokens: slots of a page.
        page_bytes: of one page in each of these lanes, with those of what a rule remembers of its
            slots.
        fixed_bytes: of what it remembers of a sequence however long that is.
    """

    num_layers: int
    heads: int
    page_tokens: int
    page_bytes: int
    fixed_bytes: int = 0
