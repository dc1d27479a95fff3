r"""Peak pages of evicting lanes: at the end of prefill, and at the end of decoding.

    slots  |        ______  <- decoding: up to the cap, or as far as the eviction schedule allows
           |   /\__/
           |  /               prefill: the whole prompt, or chunk by chunk under the cap
           +----------------- tokens

Lanes peak at different times, so the sum of the lanes' peaks would overestimate the pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quire.layout.eviction import DECODE, PREFILL_END, EvictionSpec
from quire.layout.pages import LaneGroup
from quire.scheduler.admission.need import NeedGroup, Tokens

UNBOUNDED = 1 << 60


@dataclass(frozen=True, slots=True)
class LaneOffload:
    """Offload of the oldest pages of evicting lanes.

    Attributes:
        max_pages: most offloaded pages of a lane.
        rest_pages: newest pages of a lane that stay in the arena.
        staging_slots: layers whose offloaded pages are staged at a time.
    """

    max_pages: int
    rest_pages: int
    staging_slots: int

    def saved_pages(self, group: LaneGroup, lane_pages: Tokens, retained_pages: int) -> Tokens:
        """Pages of a sequence that are not in the arena.

        Args:
            group: the lane group.
            lane_pages: pages of the shortest lane, resident and offloaded.
            retained_pages: pages of a lane after an eviction; 0 without evictions. An eviction
                settles them while the staging of all offloaded pages is in the arena too. It copies
                the offloaded ones of a layer before it frees other pages of that layer.
        """
        rest = max(self.rest_pages, retained_pages)
        offloaded = np.clip(lane_pages - (0 if retained_pages else rest), 0, self.max_pages)
        resident = np.minimum(lane_pages, np.maximum(rest, lane_pages - offloaded))
        copied = np.minimum(offloaded, retained_pages)
        added = (offloaded * self.staging_slots + copied) * group.lanes_per_layer
        saved: Tokens = np.maximum(0, (lane_pages - resident) * group.num_lanes - added)
        return saved


def evicting_pages(
    group: LaneGroup,
    sequences: NeedGroup,
    layers: tuple[int, ...],
    offload: LaneOffload | None = None,
) -> Tokens:
    """Peak pages [n] of a group of evicting lanes, or of the statistics of such lanes.

    If a budget moves slots between lanes, each lane may need one more, partly filled page.

    Args:
        group: the lane group.
        sequences: the sequences.
        layers: layers of all evicting lanes.
        offload: offload of their oldest pages; None if all pages are in the arena.
    """
    pages: Tokens | int = 0
    least: Tokens | None = None  # pages of the shortest lane
    ragged = sequences.eviction.ragged or sequences.eviction.divided
    caps = lanes_by_cap(group, sequences.eviction, layers)
    for cap, num_lanes in caps:
        slots = np.stack(list(_peak_slots(sequences, cap)))
        of_lane = -(-slots // group.page_class.tokens)
        least = of_lane if least is None else np.minimum(least, of_lane)
        pages = pages + (of_lane + (ragged & (slots < sequences.tokens))) * num_lanes
    if offload is not None and least is not None:
        pages = pages - offload.saved_pages(group, least, _retained_pages(group, sequences, caps))
    most: Tokens = np.max(pages, axis=0)
    return most


def _retained_pages(
    group: LaneGroup, sequences: NeedGroup, caps: Sequence[tuple[int | None, int]]
) -> int:
    """Pages of the longest lane after an eviction, which stay in the arena; 0 without evictions."""
    kept = [cap for cap, _ in caps if cap is not None]
    if not kept:
        return 0
    return group.page_class.pages_for(max(kept)) + sequences.eviction.ragged


def _peak_slots(sequences: NeedGroup, cap: int | None) -> Iterator[Tokens]:
    """Yield the maximum slots of a lane in prefill, unless it is over, then in decoding."""
    tokens, prompts, when = sequences.tokens, sequences.prompts, sequences.eviction.when
    if cap is None:
        yield prompts
        yield tokens
        return
    if not sequences.decodes:
        yield prompts if when in (PREFILL_END, DECODE) else np.minimum(prompts, cap)
    outputs = tokens - prompts
    if when == PREFILL_END:
        yield np.minimum(prompts, cap) + outputs
    else:
        yield np.minimum(tokens, cap)


@lru_cache(maxsize=1024)
def lanes_by_cap(
    group: LaneGroup, eviction: EvictionSpec, layers: tuple[int, ...]
) -> tuple[tuple[int | None, int], ...]:
    """Return the distinct caps of a group's lanes and the number of lanes with each cap.

    The cap of a lane with several heads is the lowest cap of its heads. Caps that are divided again
    are counted as equal: their sum does not change.

    Args:
        group: the lane group.
        eviction: the eviction specification; its caps are those of all evicting lanes.
        layers: layers of all evicting lanes.
    """
    if eviction.cap is None or eviction.lane_capacities is None or eviction.divided:
        return ((eviction.cap, group.num_lanes),)
    by_layer = np.array(eviction.lane_capacities, dtype=np.int64).reshape(len(layers), -1)
    own = by_layer[[layers.index(layer) for layer in group.layers]]
    caps = own.reshape(group.num_lanes, -1).min(axis=1)
    distinct, lanes = np.unique(caps, return_counts=True)
    return tuple(zip(distinct.tolist(), lanes.tolist(), strict=True))
