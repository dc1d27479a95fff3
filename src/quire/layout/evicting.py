"""Lane groups whose lanes evict tokens: their layers, and records that only some evictions need."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.layout.pages import CacheLayout, LaneGroup


def evicting_layers(layout: CacheLayout) -> tuple[int, ...]:
    """Return the model's layers whose lanes evict tokens, ascending."""
    groups = (group for group in layout.groups if not group.private and not group.ordered)
    return tuple(sorted({layer for group in groups for layer in group.layers}))


def lane_places(group: LaneGroup, layers: Sequence[int]) -> NDArray[np.int64]:
    """Return the index of each lane of a group among the lanes of `layers`, layer-major."""
    index = np.array([layers.index(layer) for layer in group.layers], dtype=np.int64)
    per_layer = group.lanes_per_layer
    places: NDArray[np.int64] = (index[:, None] * per_layer + np.arange(per_layer)).ravel()
    return places


def without_relocated_tokens(layout: CacheLayout) -> CacheLayout:
    """Return a layout without records for tokens that evictions move into a page that is not full.

    For sequences whose evictions drop whole pages and move no slot.
    """
    return replace(layout, groups=tuple(map(_without_relocated, layout.groups)))


def _without_relocated(group: LaneGroup) -> LaneGroup:
    tokens = group.full_precision
    if tokens is None or not tokens.relocated:
        return group
    tokens = replace(tokens, relocated=0)
    page_class = replace(group.page_class, tokens=tokens.records, positions=False)
    return replace(group, page_class=page_class, records=tokens.records, full_precision=tokens)
