"""Stores by name, and tables of what each cannot do, and of what no store does together.

What is missing in the table goes together. A fork copies the row where pages have one holder each;
eviction frees slots for the tokens that follow, but no bytes of a run; lanes that evict are never
those that go round.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from quire.errors import UnknownName, UnsoundCombination
from quire.kv.stores.base import Placement, PlacementMaker
from quire.kv.stores.contiguous import Contiguous
from quire.kv.stores.paged import Paged
from quire.kv.stores.ring import Ring
from quire.kv.stores.runs import Doubling, LaneLimits, MaximumLength, RunLengths
from quire.layout.pages import CacheLayout

PREFIX_CACHE = "prefix_cache"
NO_WINDOW = "no_window"
PRE_ROPE = "unrotated"
LOSSY_CODEC = "lossy_codec"


@dataclass(frozen=True, slots=True)
class Unsound:
    """Why a store and a feature do not go together, and what to use instead."""

    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.instead}"


_ONE_HOLDER = Unsound(
    "a page of a contiguous run has one holder: a cached prefix would keep a whole run alive and "
    "could not be named by another lane",
    "to share prefixes use the store 'paged'",
)
_NO_WINDOW = Unsound("no layer has a sliding window, so no lane could go round", "use 'paged'")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store that can be named.

    Attributes:
        summary: one sentence.
        placement: makes its `Placement`.
        run_lengths: of stores that lay lanes out in runs, how long those are.
    """

    summary: str
    placement: Callable[..., Placement]
    run_lengths: Callable[[LaneLimits], RunLengths] | None = None


STORES: Mapping[str, StoreInfo] = MappingProxyType(
    {
        "paged": StoreInfo("pages one by one, from anywhere; pages behind a window return", Paged),
        "contiguous_max": StoreInfo(
            "one run a lane, as long as the longest sequence, from its first token on; never moves",
            Contiguous,
            MaximumLength,
        ),
        "contiguous_growing": StoreInfo(
            "one run a lane, twice as long each time it is full; the lane is copied there",
            Contiguous,
            Doubling,
        ),
        "ring": StoreInfo(
            "lanes of sliding windows go round in their own pages, the others are paged",
            Ring,
        ),
    }
)

UNSOUND: Mapping[tuple[str, str], Unsound] = MappingProxyType(
    {
        ("contiguous_max", PREFIX_CACHE): _ONE_HOLDER,
        ("contiguous_growing", PREFIX_CACHE): _ONE_HOLDER,
        ("ring", NO_WINDOW): _NO_WINDOW,
    }
)


UNSOUND_TOGETHER: Mapping[tuple[str, str], Unsound] = MappingProxyType(
    {
        (PRE_ROPE, PREFIX_CACHE): Unsound(
            "keys are stored before RoPE, for streams, and a stream parts from every other at its "
            "first eviction: no prefix behind its cap could be shared",
            "to share prefixes use 'sinks'",
        ),
        (PRE_ROPE, LOSSY_CODEC): Unsound(
            "keys before RoPE are turned as plain numbers whenever they are attended, and codes "
            "would have to be read and turned at every look",
            "use a plain codec, or 'sinks'",
        ),
    }
)
"""Features that exclude each other whatever the store."""


def store_info(name: str) -> StoreInfo:
    """A store by its name.

    Raises:
        UnknownName: there is none.
    """
    if name not in STORES:
        raise UnknownName("KV store", name, STORES)
    return STORES[name]


def run_lengths(name: str, limits: LaneLimits) -> RunLengths | None:
    """How long the runs of a store are; None where lanes do not lie in runs.

    Raises:
        UnknownName: no store has this name.
    """
    make = store_info(name).run_lengths
    return None if make is None else make(limits)


def placement_maker(name: str, limits: LaneLimits) -> PlacementMaker:
    """What `KVMemory` makes its placement with.

    Raises:
        UnknownName: no store has this name.
    """
    placement, lengths = store_info(name).placement, run_lengths(name, limits)
    return placement if lengths is None else partial(placement, lengths=lengths)


def unsound(name: str, feature: str) -> Unsound | None:
    """Why a store and a feature do not go together; None where they do."""
    return UNSOUND.get((name, feature))


def refuse_unsound(name: str, features: Mapping[str, bool]) -> None:
    """Refuse what a store cannot do.

    Args:
        name: of the store.
        features: which of the features above are asked for.

    Raises:
        UnsoundCombination: with the reason and the alternative.
    """
    for feature, requested in features.items():
        why = unsound(name, feature)
        if requested and why is not None:
            raise UnsoundCombination(f"store {name!r}: {why}")
    for pair, why in UNSOUND_TOGETHER.items():
        if all(features.get(feature, False) for feature in pair):
            raise UnsoundCombination(str(why))


def features_of(layout: CacheLayout, *, enable_prefix_caching: bool) -> dict[str, bool]:
    """What a configuration asks of a store. Ask for no prefix cache where one may be left out."""
    return {
        PREFIX_CACHE: enable_prefix_caching,
        NO_WINDOW: all(group.window is None for group in layout.groups),
        PRE_ROPE: not all(group.page_class.rotated for group in layout.groups),
        LOSSY_CODEC: not all(group.page_class.is_plain for group in layout.groups),
    }
