r"""Peak pages of evicting lanes: at the end of prefill, and at the end of decoding.

    slots  |        ______  <- decoding: up to the cap, or as far as the eviction schedule allows
           |   /\__/
           |  /               prefill: the whole prompt, or chunk by chunk under the cap
           +----------------- tokens

Lanes peak at different times, so the sum of the lanes' peaks would overestimate the pages.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from quire.kv.stores.base import Placement
from quire.layout.eviction import DECODE, PREFILL_END, EvictionSpec
from quire.layout.pages import LaneGroup
from quire.scheduler.admission.need import NeedGroup, Tokens

UNBOUNDED = 1 << 60


def evicting_pages(placement: Placement, group: LaneGroup, sequences: NeedGroup) -> Tokens:
    """Peak pages [n] of a group of evicting lanes, or of the statistics of such lanes.

    If a budget moves slots between lanes, each lane may need one more, partly filled page.
    """
    pages: Tokens | int = 0
    ragged = sequences.eviction.ragged or sequences.eviction.divided
    for cap, num_lanes in lanes_by_cap(group, sequences.eviction):
        slots = np.stack(list(_peak_slots(sequences, cap)))
        of_lane = placement.peak_pages(group, slots, UNBOUNDED)
        pages = pages + (of_lane + (ragged & (slots < sequences.tokens))) * num_lanes
    most: Tokens = np.max(pages, axis=0)
    return most


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
def lanes_by_cap(group: LaneGroup, eviction: EvictionSpec) -> tuple[tuple[int | None, int], ...]:
    """Return the distinct caps of a group's lanes and the number of lanes with each cap.

    The cap of a lane with several heads is the lowest cap of its heads. Caps that are divided again
    are counted as equal: their sum does not change.
    """
    if eviction.cap is None or eviction.lane_capacities is None or eviction.divided:
        return ((eviction.cap, group.num_lanes),)
    caps = (
        np.array(eviction.lane_capacities, dtype=np.int64).reshape(group.num_lanes, -1).min(axis=1)
    )
    distinct, lanes = np.unique(caps, return_counts=True)
    return tuple(zip(distinct.tolist(), lanes.tolist(), strict=True))
