"""How long a run is: as long as a lane can get, or twice as long each time it is full."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from quire.layout.eviction import PRESSURE, EvictionSpec
from quire.layout.pages import LaneGroup

Counts = NDArray[np.int64]
GROWTH_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLimits:
    """How long lanes can get: what a store that reserves ahead must know.

    Attributes:
        max_tokens: of the longest sequence.
        evicting_slots: of the longest lane that evicts.
        ragged: whether slots move between the heads of a layer: one may hold what is all of theirs.
    """

    max_tokens: int
    evicting_slots: int
    ragged: bool = False

    @classmethod
    def of(cls, max_tokens: int, eviction: EvictionSpec) -> "LaneLimits":
        """Of sequences of up to `max_tokens` tokens; without pressure nothing leaves."""
        caps = eviction.lane_caps or (eviction.cap,)
        longest = max(eviction.lane_peak_tokens(cap, max_tokens, None) for cap in caps)
        if eviction.when == PRESSURE:
            longest = max_tokens
        return cls(max_tokens=max_tokens, evicting_slots=longest, ragged=eviction.ragged)

    def most_pages(self, group: LaneGroup) -> int:
        """Pages of the longest lane of a group. A window changes nothing: a run has no holes."""
        slots = group.slots_of(self.max_tokens)
        if not group.ordered and group.fixed_slots is None:
            lanes = group.lanes_per_layer if self.ragged else 1
            slots = min(slots, self.evicting_slots * lanes)
        return group.page_class.pages_for(slots)


class RunLengths(ABC):
    """Decides how long the run of a lane is."""

    moves: ClassVar[bool]  # lanes that outgrow their run are copied to a longer one

    @property
    @abstractmethod
    def longest_tokens(self) -> int | None:
        """Tokens of the longest sequence; None where only the arena bounds it."""

    def border_slabs(self, num_classes: int) -> int:
        """Slabs that a class's runs may lie in beyond those that they fill.

        Other classes may hold the slabs behind its runs: longer runs then begin a slab of their
        own, and the end of the last slab is left free.
        """
        return int(self.moves and num_classes > 1)

    @abstractmethod
    def run_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """Pages of the runs of lanes that need `needed` pages, or less: a lane is never longer."""

    @abstractmethod
    def peak_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """Most pages they hold on the way there, the run before included while it is copied."""


@final
@dataclass(frozen=True, slots=True)
class MaximumLength(RunLengths):
    """Every run is as long as the longest lane: nothing ever moves.

    Source: the KV tensors of FasterTransformer and Orca; papers/001, "Contiguous allocation".
    """

    moves: ClassVar[bool] = False
    limits: LaneLimits

    @property
    def longest_tokens(self) -> int | None:
        """See `RunLengths`."""
        return self.limits.max_tokens

    def run_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        return np.full_like(needed, self.limits.most_pages(group))

    def peak_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        return np.maximum(self.run_pages(group, needed), needed)


@final
@dataclass(frozen=True, slots=True)
class Doubling(RunLengths):
    """A run is the smallest power of two of pages that holds the lane, at most the longest lane.

    Each page is copied less than twice, over the life of a lane, and a run is at least half full.

    Source: dynamic arrays (Cormen et al., "Dynamic tables"). Differs from caches that are
    concatenated anew for every token, such as Transformers' DynamicCache: those copy every token at
    every step.
    """

    moves: ClassVar[bool] = True
    limits: LaneLimits

    @property
    def longest_tokens(self) -> int | None:
        """See `RunLengths`."""
        return None

    def run_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        most = self.limits.most_pages(group)
        return np.minimum(_power_of_two(needed), np.maximum(most, needed))

    def peak_pages(self, group: LaneGroup, needed: Counts) -> Counts:
        """See `RunLengths`."""
        before = np.where(needed > 1, _power_of_two(needed) // GROWTH_FACTOR, 0)
        return self.run_pages(group, needed) + before


def _power_of_two(needed: Counts) -> Counts:
    """The smallest power of the growth factor that is at least `needed`; 0 for 0."""
    power: Counts = GROWTH_FACTOR ** np.ceil(np.log2(np.maximum(needed, 1))).astype(np.int64)
    return np.where(needed > 0, power, 0)
