"""The registry of stores, and tables of unsupported combinations.

Combinations that are not in a table are supported. In stores without page sharing a fork copies the
row. In stores with runs eviction frees slots for later tokens, but no bytes. In the ring store,
lanes with eviction are never ring lanes.
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
PRE_ROPE = "pre_rope"


@dataclass(frozen=True, slots=True)
class Unsound:
    """The reason why a store and a feature cannot be combined, and the alternative."""

    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.instead}"


_ONE_HOLDER = Unsound(
    "pages of a contiguous run cannot be shared: a cached prefix would keep a whole run allocated "
    "and could not be part of another lane's run",
    "to share prefixes use the store 'paged'",
)
_NO_WINDOW = Unsound("no layer has a sliding window, so no lane could be a ring", "use 'paged'")


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A registered store.

    Attributes:
        summary: short description.
        placement: creates the store's `Placement`.
        run_lengths: creates the `RunLengths` of a store with runs; None for other stores.
    """

    summary: str
    placement: Callable[..., Placement]
    run_lengths: Callable[[LaneLimits], RunLengths] | None = None


STORES: Mapping[str, StoreInfo] = MappingProxyType(
    {
        "paged": StoreInfo(
            "pages allocated one by one, not contiguous; pages outside a window are freed", Paged
        ),
        "contiguous_max": StoreInfo(
            "one contiguous run per lane, as long as the longest sequence; never copied",
            Contiguous,
            MaximumLength,
        ),
        "contiguous_growing": StoreInfo(
            "one contiguous run per lane; a full run is copied to one of twice its length",
            Contiguous,
            Doubling,
        ),
        "ring": StoreInfo(
            "sliding-window lanes are ring buffers of their own pages; other lanes are paged",
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


UNSOUND_TOGETHER: Mapping[tuple[str, str], Unsound] = MappingProxyType({})
"""Features that cannot be combined in any store."""


def store_info(name: str) -> StoreInfo:
    """Return a store by its name.

    Raises:
        UnknownName: no store has this name.
    """
    if name not in STORES:
        raise UnknownName("KV store", name, STORES)
    return STORES[name]


def run_lengths(name: str, limits: LaneLimits) -> RunLengths | None:
    """Return the run lengths of a store; None if the store has no runs.

    Raises:
        UnknownName: no store has this name.
    """
    make = store_info(name).run_lengths
    return None if make is None else make(limits)


def placement_maker(name: str, limits: LaneLimits) -> PlacementMaker:
    """Return the function with which `KVMemory` creates its placement.

    Raises:
        UnknownName: no store has this name.
    """
    placement, lengths = store_info(name).placement, run_lengths(name, limits)
    return placement if lengths is None else partial(placement, lengths=lengths)


def unsound(name: str, feature: str) -> Unsound | None:
    """Return why a store and a feature cannot be combined; None if they can."""
    return UNSOUND.get((name, feature))


def refuse_unsound(name: str, features: Mapping[str, bool]) -> None:
    """Refuse unsupported combinations of a store and features.

    Args:
        name: name of the store.
        features: whether each of the features above is requested.

    Raises:
        UnsoundCombination: a combination is unsupported; the message states reason and alternative.
    """
    for feature, requested in features.items():
        why = unsound(name, feature)
        if requested and why is not None:
            raise UnsoundCombination(f"store {name!r}: {why}")
    for pair, why in UNSOUND_TOGETHER.items():
        if all(features.get(feature, False) for feature in pair):
            raise UnsoundCombination(str(why))


def features_of(layout: CacheLayout, *, enable_prefix_caching: bool) -> dict[str, bool]:
    """Return the features that a configuration requests of a store.

    `enable_prefix_caching` must be False if the prefix cache is optional.
    """
    return {
        PREFIX_CACHE: enable_prefix_caching,
        NO_WINDOW: all(group.window is None for group in layout.groups),
        PRE_ROPE: not all(group.page_class.rotated for group in layout.groups),
    }
