r"""Pages of lanes that lose tokens, at the two moments when they are longest.

    slots  |        ______  <- the answer grows to its cap, or by what the schedule lets it
           |   /\__/
           |  /               the prompt is read: whole, or block by block under the cap
           +----------------- tokens

Lanes peak at different moments: the sum of each lane's peak would be more than any moment holds.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from quire.kv.stores.base import Placement
from quire.layout.eviction import DECODE, PREFILL_END, EvictionSpec
from quire.layout.pages import LaneGroup
from quire.scheduler.admission.need import Alike, Tokens

UNBOUNDED = 1 << 60


def evicting_pages(placement: Placement, group: LaneGroup, sequences: Alike) -> Tokens:
    """Pages [n] of a group whose lanes lose tokens, or of statistics of such lanes.

    Where a budget moves slots between heads, each lane may end in a page of its own: one more.
    """
    shape = (2, len(sequences.tokens))
    pages = np.zeros(shape, dtype=np.int64)
    ragged = sequences.eviction.ragged
    for cap, num_lanes in lanes_by_cap(group, sequences.eviction):
        slots = np.stack(list(_peak_slots(sequences, cap)))
        of_lane = placement.peak_pages(group, slots, UNBOUNDED)
        pages += (of_lane + (ragged & (slots < sequences.tokens))) * num_lanes
    most: Tokens = pages.max(axis=0)
    return most


def _peak_slots(sequences: Alike, cap: int | None) -> Iterator[Tokens]:
    """Most slots of a lane while the prompt is read, and then while the answer grows."""
    tokens, prompts, when = sequences.tokens, sequences.prompts, sequences.eviction.when
    if cap is None:
        yield prompts
        yield tokens
        return
    yield prompts if when in (PREFILL_END, DECODE) else np.minimum(prompts, cap)
    answered = tokens - prompts
    if when == PREFILL_END:
        yield np.minimum(prompts, cap) + answered
    else:
        yield np.minimum(tokens, cap)


@lru_cache(maxsize=1024)
def lanes_by_cap(group: LaneGroup, eviction: EvictionSpec) -> tuple[tuple[int | None, int], ...]:
    """The distinct caps of a group's lanes, and how many lanes have each.

    A lane that serves several heads has the least of theirs.
    """
    if eviction.cap is None or eviction.lane_caps is None:
        return ((eviction.cap, group.num_lanes),)
    caps = np.array(eviction.lane_caps, dtype=np.int64).reshape(group.num_lanes, -1).min(axis=1)
    distinct, lanes = np.unique(caps, return_counts=True)
    return tuple(zip(distinct.tolist(), lanes.tolist(), strict=True))
