"""A KV memory without bytes, in which a simulation's sequences live."""

from dataclasses import replace

from quire.kv.arena import choose_slab_bytes
from quire.kv.config import KVConfig
from quire.kv.memory import KVMemory
from quire.kv.stores.registry import features_of, placement_maker, refuse_unsound, run_lengths
from quire.kv.stores.run_lengths import LaneLimits
from quire.plan.sizes import parse_size
from quire.sim.traces.base import Trace
from quire.spec.layout import layout_for
from quire.spec.model import ModelSpec
from quire.spec.pages import CacheLayout, LaneGroup

AUTO = "auto"


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
    heads = group.page_class.heads * len(group.layers)
    return replace(group, page_class=replace(group.page_class, heads=heads), layers=(0,))


def make_memory(
    layout: CacheLayout, config: KVConfig, limits: LaneLimits, trace: Trace, max_running: int
) -> KVMemory:
    """Bookkeeping over an arena that is not there.

    Args:
        layout: lane groups.
        config: how large, in which store; `auto` never runs full.
        limits: of the longest sequence, for stores that reserve.
        trace: that `auto` has room for.
        max_running: sequences at once.

    Raises:
        ConfigError: it would hold no token, or a store that cannot do what is asked.
    """
    refuse_unsound(config.store, features_of(layout, prefix_cache=False))
    maker = placement_maker(config.store, limits)
    total_bytes = (
        bytes_for_all(config, layout, limits, trace)
        if config.memory == AUTO
        else parse_size(config.memory)
    )
    return KVMemory(layout, total_bytes, max_running, placement=maker)


def bytes_for_all(config: KVConfig, layout: CacheLayout, limits: LaneLimits, trace: Trace) -> int:
    """Bytes of an arena that holds every request of a trace at once: it never runs full.

    Args:
        config: which store; one that reserves takes the longest sequence's bytes for each.
        layout: lane groups.
        limits: of the longest sequence.
        trace: the requests.
    """
    reserves = run_lengths(config.store, limits) is not None
    total_bytes = 0
    for group in layout.groups:
        pages = sum(group.page_class.pages_for(r.tokens) + 1 for r in trace.requests)
        if reserves:
            pages = limits.most_pages(group) * len(trace.requests)
        total_bytes += pages * group.page_class.page_bytes * group.num_lanes
    sizes = [page_class.page_bytes for page_class in layout.page_classes]
    # slab borders may cut pages, and each class can leave a slab half empty
    slack_bytes = (len(sizes) + 1) * choose_slab_bytes(1 << 60, sizes)
    return (total_bytes * 3 // 2 if len(sizes) > 1 else total_bytes) + slack_bytes
