"""Simulated components of the engine: clock, copies, tokens, eviction, KV memory."""

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
from quire.scheduler.lane_slots import Slots, evicting_lanes
from quire.scheduler.request import Request
from quire.sim.traces.base import Segment

# The virtual clock of a simulation, advanced by the simulator.


class VirtualClock:
    """Virtual time in seconds since the first arrival.

    Attributes:
        now_s: the time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The current time, in the interface of event logs."""
        return self.now_s


# ---- copies --------------------------------------------------------------------------------------

# Copies between device and host that transfer no bytes, but take simulated time.


class TimedCopies:
    """`HostCopies` in simulated time: a copy takes its bytes divided by the rate.

    Args:
        bytes_per_s: rate of the link, in each direction.

    Attributes:
        seconds: total duration of all copies.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.seconds = 0.0
        self._bytes_per_s = bytes_per_s
        self._paid_s = 0.0

    def __call__(self) -> float:
        """The clock for timing copies."""
        return self.seconds

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Count the time of copies to the host."""
        self.seconds += len(pages) * page_class.page_bytes / self._bytes_per_s

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Count the time of copies back."""
        self.save(page_class, pages, start)

    def wait(self) -> None:
        """Return at once: no copy is pending."""

    def unpaid_s(self) -> float:
        """Copy time since the last call; the next step waits for it."""
        unpaid_s, self._paid_s = self.seconds - self._paid_s, self.seconds
        return unpaid_s


# ---- tokens --------------------------------------------------------------------------------------

# Token ids for text segments that are known only by identity and length.

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ID_BITS = 31  # packed ids fit into int32


def token_ids(segments: Sequence[Segment]) -> list[int]:
    """Ids of a sequence of segments, computed from their contents and offsets.

    Equal contents have equal ids at equal offsets. Ids of different contents collide with
    probability 2^-31 per token. Ids are not entries of a vocabulary.

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
    values = values * _STEP + _STEP  # overflow is intended
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


# ---- eviction ------------------------------------------------------------------------------------

# Eviction without tensors: the choice of slots does not change page counts, so evict the oldest.


class OldestFirstEvictor:
    """Evicts the oldest slots of a request until its lanes fit their capacities.

    Args:
        memory: KV memory of the simulation.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """Retain the last `keep` [lanes] slots of every lane that can evict tokens."""
        memory, lanes = self._memory, evicting_lanes(self._memory)
        assert lanes is not None, "only called for a layout that evicts"
        row = request.memory.row
        held = lanes.held(row)
        slot = np.arange(int(held.max(initial=0)))
        mask = (slot >= (held - keep)[:, None]) & (slot < held[:, None])
        plans = [
            plan_compaction(memory, table.group.name, row, mask[places])
            for table, places in zip(lanes.tables, lanes.places, strict=True)
        ]
        if least_gain is not None and sum(plan.gain_bytes for plan in plans) < least_gain:
            return None
        commit_compaction(memory, *plans)
        return Evicted(int((held - keep).clip(min=0).sum()), len(held))

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Raise: no evictions are recorded, so none can be repeated."""
        raise InvariantError(
            f"request {request.request_id} repeats an eviction that was not recorded"
        )

    def finalize(self, request: Request) -> None:
        """Do nothing: a division of the cap after the prompt needs a model."""


# ---- memory --------------------------------------------------------------------------------------

# A KV memory without bytes, which holds the sequences of a simulation.

MAX_PAGES = 1 << 28
"""Maximum pages of a simulated memory: each page needs a few bytes of bookkeeping."""


def folded_layout(
    model: ModelSpec, *, codec: str, page_tokens: int, evicting: bool = False
) -> CacheLayout:
    """A sequence's lane groups with one lane in place of each group's layers.

    Layers of a group hold the same number of slots of every sequence. One table whose pages are as
    large as those of all layers together allocates and frees the same bytes, in less time. If
    layers have different windows, the waste at slab boundaries can differ by a page or two.

    Args:
        model: the shape.
        codec: codec of keys and values.
        page_tokens: slots in a page.
        evicting: single tokens are evicted from lanes of full attention.
    """
    layout = layout_for(model, codec=codec, page_tokens=page_tokens, evicting=evicting)
    return CacheLayout(tuple(map(_folded, layout.groups)))


def _folded(group: LaneGroup) -> LaneGroup:
    page_class = replace(group.page_class, layers=len(group.layers))
    return replace(group, page_class=page_class, layers=group.layers[:1])


def make_memory(
    layout: CacheLayout,
    config: KVConfig,
    limits: LaneLimits,
    lengths: Sequence[int],
    max_num_seqs: int,
) -> KVMemory:
    """Create a KV memory with bookkeeping only: its arena is not allocated.

    Args:
        layout: lane groups.
        config: size and store; an `auto` memory never runs full.
        limits: lengths of the longest sequence, for stores that reserve memory.
        lengths: lengths in tokens of the sequences that fit into an `auto` memory.
        max_num_seqs: maximum number of concurrent sequences.

    Raises:
        ConfigError: the memory is too small for a token, exceeds the maximum number of pages, or
            the store does not support the options.
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
            f"expected at most {MAX_PAGES:,}; lower --kv-memory, use fewer or shorter requests, "
            "or raise --block-size"
        )


def bytes_for_all(
    config: KVConfig, layout: CacheLayout, limits: LaneLimits, lengths: Sequence[int]
) -> int:
    """Bytes of an arena that holds every request of a trace at once: it never runs full.

    Args:
        config: the store; a store that reserves memory needs the longest sequence's bytes for each.
        layout: lane groups.
        limits: limits of the longest sequence.
        lengths: lengths of the requests, in tokens.
    """
    reserves = run_lengths(config.store, limits) is not None
    total_bytes = 0
    for group in layout.groups:
        pages = sum(group.page_class.pages_for(tokens) + 1 for tokens in lengths)
        if reserves:
            pages = limits.most_pages(group) * len(lengths)
        total_bytes += pages * group.page_class.page_bytes * group.num_lanes
    sizes = [page_class.page_bytes for page_class in layout.page_classes]
    # pages may cross slab boundaries, and each class can leave a slab half empty
    slack_bytes = (len(sizes) + 1) * choose_slab_bytes(1 << 60, sizes)
    return (total_bytes * 3 // 2 if len(sizes) > 1 else total_bytes) + slack_bytes
