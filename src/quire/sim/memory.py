"""A KV memory without bytes, in which a simulation's sequences live."""

from collections.abc import Sequence
from dataclasses import replace

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.kv.arena import choose_slab_bytes
from quire.kv.memory import KVMemory
from quire.kv.stores.registry import features_of, placement_maker, refuse_unsound, run_lengths
from quire.kv.stores.runs import LaneLimits
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout, LaneGroup

MAX_PAGES = 1 << 28
"""Pages of a simulated memory at most: each takes some bytes of bookkeeping, though it has none."""


def folded_layout(
    model: ModelSpec, *, codec: str, page_tokens: int, evicting: bool = False
) -> CacheLayout:
    """A sequence's lane groups with one lane in place of each group's layers.

    Layers of a group hold equally many slots of every sequence, so one table with pages as large as
    all layers' together makes the same decisions about the same bytes, with a fraction of the work.
    Where layers have different windows, borders of slabs can fall elsewhere, by a page or two.

    Args:
        model: the shape.
        codec: how keys and values are stored.
        page_tokens: slots in a page.
        evicting: lanes of full attention lose tokens one by one.
    """
    layout = layout_for(model, codec=codec, page_tokens=page_tokens, evicting=evicting)
    return CacheLayout(tuple(map(_folded, layout.groups)))


def _folded(group: LaneGroup) -> LaneGroup:
    page_class = replace(group.page_class, layers=len(group.layers))
    return replace(group, page_class=page_class, layers=(0,))


def make_memory(
    layout: CacheLayout,
    config: KVConfig,
    limits: LaneLimits,
    lengths: Sequence[int],
    max_num_seqs: int,
) -> KVMemory:
    """Bookkeeping over an arena that is not there.

    Args:
        layout: lane groups.
        config: how large, in which store; `auto` never runs full.
        limits: of the longest sequence, for stores that reserve.
        lengths: of the sequences that `auto` has room for, in tokens.
        max_num_seqs: sequences at once.

    Raises:
        ConfigError: it would hold no token, or more pages than can be kept account of, or a store
            that cannot do what is asked.
    """
    refuse_unsound(config.store, features_of(layout, enable_prefix_caching=False))
    maker = placement_maker(config.store, limits)
    total_bytes = (
        bytes_for_all(config, layout, limits, lengths) if config.memory is None else config.memory
    )
    _refuse_too_many_pages(layout, total_bytes)
    return KVMemory(layout, total_bytes, max_num_seqs, placement=maker)


def _refuse_too_many_pages(layout: CacheLayout, total_bytes: int) -> None:
    smallest = min(page_class.page_bytes for page_class in layout.page_classes)
    if total_bytes // smallest > MAX_PAGES:
        raise ConfigError(
            f"a simulated KV memory of {total_bytes:,} B has {total_bytes // smallest:,} pages, "
            f"{MAX_PAGES:,} at most can be kept account of; lower --kv-memory, take fewer or "
            "shorter requests, or raise --block-size"
        )


def bytes_for_all(
    config: KVConfig, layout: CacheLayout, limits: LaneLimits, lengths: Sequence[int]
) -> int:
    """Bytes of an arena that holds every request of a trace at once: it never runs full.

    Args:
        config: which store; one that reserves takes the longest sequence's bytes for each.
        layout: lane groups.
        limits: of the longest sequence.
        lengths: of the requests, in tokens.
    """
    reserves = run_lengths(config.store, limits) is not None
    total_bytes = 0
    for group in layout.groups:
        pages = sum(group.page_class.pages_for(tokens) + 1 for tokens in lengths)
        if reserves:
            pages = limits.most_pages(group) * len(lengths)
        total_bytes += pages * group.page_class.page_bytes * group.num_lanes
    sizes = [page_class.page_bytes for page_class in layout.page_classes]
    # slab borders may cut pages, and each class can leave a slab half empty
    slack_bytes = (len(sizes) + 1) * choose_slab_bytes(1 << 60, sizes)
    return (total_bytes * 3 // 2 if len(sizes) > 1 else total_bytes) + slack_bytes
