"""Number of a model's lanes that evict, and the size of their pages."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneShape:
    """The layers of a model that evict: those without a sliding window.

    Attributes:
        num_layers: number of such layers.
        heads: KV heads of each layer.
        page_tokens: slots of a page.
        page_bytes: bytes of one page in each of these lanes, including per-slot statistics.
        fixed_bytes: bytes of statistics per sequence that do not depend on its length.
    """

    num_layers: int
    heads: int
    page_tokens: int
    page_bytes: int
    fixed_bytes: int = 0
