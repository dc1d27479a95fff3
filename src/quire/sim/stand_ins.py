"""What a simulation has for an engine's parts: a clock, copies, tokens, evictions, KV memory."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, InvariantError
from quire.kv.arena import choose_slab_bytes
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.stores.registry import features_of, placement_maker, refuse_unsound, run_lengths
from quire.kv.stores.runs import LaneLimits
from quire.layout.layout import layout_for
from quire.layout.model import ModelSpec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_capacities import Evicted
from quire.scheduler.lane_slots import Slots, evicting_table
from quire.scheduler.request import Request
from quire.sim.traces.base import Segment

# The clock of a simulation: it stands still until it is told how much time has passed.


class VirtualClock:
    """Seconds since the first request came.

    Attributes:
        now_s: the time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time, as event logs ask for it."""
        return self.now_s


# ---- copies --------------------------------------------------------------------------------------

# Copies between device and host that move no bytes and take their time all the same.


class TimedCopies:
    """`HostCopies` on a clock of their own: it advances by bytes over a rate.

    Args:
        bytes_per_s: of a link, either way.

    Attributes:
        seconds: of all copies so far.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.seconds = 0.0
        self._bytes_per_s = bytes_per_s
        self._paid_s = 0.0

    def __call__(self) -> float:
        """The clock, as who times copies reads it."""
        return self.seconds

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Count the time of copies to the host."""
        self.seconds += len(pages) * page_class.page_bytes / self._bytes_per_s

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Count the time of copies back."""
        self.save(page_class, pages, start)

    def wait(self) -> None:
        """Nothing to wait for."""

    def unpaid_s(self) -> float:
        """Seconds since this was last asked: the next step waits for them."""
        unpaid_s, self._paid_s = self.seconds - self._paid_s, self.seconds
        return unpaid_s


# ---- tokens --------------------------------------------------------------------------------------

# Token ids for pieces of text that are known by their identity and their length alone.

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ID_BITS = 31  # ids fit into int32 wherever they are packed


def token_ids(segments: Sequence[Segment]) -> list[int]:
    """Ids of a sequence of pieces, from their contents and offsets alone.

    Equal contents give equal ids at equal offsets, others differ but for one chance in 2^31 a
    token. Ids are no entries of a vocabulary.

    Source: the mixing function of SplitMix64 (Steele et al., 2014).
    """
    lengths = np.array([segment.tokens for segment in segments], dtype=np.int64)
    contents = np.array([segment.content for segment in segments], dtype=np.int64)
    total = int(lengths.sum())
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets = (np.arange(total) - starts).astype(np.uint64)
    seeds = _mixed(np.repeat(contents, lengths).view(np.uint64))
    ids: list[int] = (_mixed(seeds + offsets) >> np.uint64(64 - _ID_BITS)).astype(np.int64).tolist()
    return ids


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values * _STEP + _STEP  # wraps around, as meant
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


# ---- forgetting ----------------------------------------------------------------------------------

# Eviction without tensors: which slots leave changes no page count, so the oldest ones do.


class OldestLeave:
    """Brings the lanes of a request down to what the schedule lets them keep.

    Args:
        memory: of the simulation.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """Keep the last `keep` [lanes] slots of every lane that may lose some."""
        memory, table = self._memory, evicting_table(self._memory)
        assert table is not None, "requests evict where lanes lose tokens"
        held = table.num_slots[request.memory.row]
        slot = np.arange(int(held.max(initial=0)))
        mask = (slot >= (held - keep)[:, None]) & (slot < held[:, None])
        plan = plan_compaction(memory, table.group.name, request.memory.row, mask)
        if least_gain is not None and plan.gain_bytes < least_gain:
            return None
        commit_compaction(memory, plan)
        return Evicted(int((held - keep).clip(min=0).sum()), len(held))

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Nothing is noted, so that nothing is repeated: it is evicted anew."""
        raise InvariantError(f"request {request.request_id} repeats what was not noted")

    def finalize(self, request: Request) -> None:
        """Caps stay as they are: how a prompt would divide them only a model can tell."""


# ---- memory --------------------------------------------------------------------------------------

# A KV memory without bytes, in which a simulation's sequences live.

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
