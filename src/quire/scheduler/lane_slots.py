"""Slot counts of lanes: how many tokens fit, and how many slots must be evicted for them.

A lane whose slots plus the next tokens would exceed its cap is evicted to its cap minus `leaving`.
If a budget moves slots between the heads of a layer, the sums over layers are compared instead of
lanes. Torch-free; the eviction policy selects the slots.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.tables import LaneTable
from quire.layout.evicting import evicting_layers, lane_places
from quire.layout.eviction import (
    DECODE,
    PREFILL_AND_DECODE,
    PREFILL_END,
    PRESSURE,
    UNLIMITED,
    EvictionSpec,
)
from quire.scheduler.request import Request

Slots = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EvictingLanes:
    """The lanes that evict tokens, in the order of their layers.

    Layers with different codecs are in different lane groups. Caps and rules count all their lanes.

    Attributes:
        tables: page tables of the lane groups.
        places: for each table, the index [lanes of the table] of its lanes among all lanes.
        layers: the model's layers, ascending.
        lanes_per_layer: lanes of a layer.
        page_tokens: slots of a page.
    """

    tables: tuple[LaneTable, ...]
    places: tuple[Slots, ...]
    layers: tuple[int, ...]
    lanes_per_layer: int
    page_tokens: int

    @property
    def num_lanes(self) -> int:
        """Number of lanes of a sequence."""
        return sum(table.group.num_lanes for table in self.tables)

    def held(self, row: int) -> Slots:
        """Slots [lanes] of a row."""
        if len(self.tables) == 1:
            only: Slots = self.tables[0].num_slots[row].astype(np.int64)
            return only
        held = np.empty(self.num_lanes, dtype=np.int64)
        for table, places in zip(self.tables, self.places, strict=True):
            held[places] = table.num_slots[row]
        return held


def evicting_lanes(memory: KVMemory) -> EvictingLanes | None:
    """The lanes that evict tokens; None if no lane does."""
    tables = tuple(t for t in memory.tables.values() if not t.group.ordered and not t.group.private)
    if not tables:
        return None
    group = tables[0].group
    layers = evicting_layers(memory.layout)
    return EvictingLanes(
        tables=tables,
        places=tuple(lane_places(table.group, layers) for table in tables),
        layers=layers,
        lanes_per_layer=group.lanes_per_layer,
        page_tokens=group.page_class.tokens,
    )


def held_slots(lanes: EvictingLanes, request: Request) -> Slots:
    """Slots [lanes] that a running request holds."""
    return lanes.held(request.memory.row)


def lane_capacities(spec: EvictionSpec, num_lanes: int) -> Slots:
    """Cap [lanes] of each lane; a lane with several heads has their lowest cap.

    Args:
        spec: an eviction specification with a cap.
        num_lanes: number of lanes.
    """
    assert spec.cap is not None, "only for requests that evict"
    return _caps(spec.cap, spec.lane_capacities, num_lanes)


@lru_cache(maxsize=1024)
def _caps(cap: int, by_head: tuple[int, ...] | None, lanes: int) -> Slots:
    if by_head is None:
        caps = np.full(lanes, cap, dtype=np.int64)
    else:
        caps = np.array(by_head, dtype=np.int64).reshape(lanes, -1).min(axis=1)
    caps.setflags(write=False)
    return caps


def slots_to_keep(request: Request, lanes: EvictingLanes, tokens: int) -> Slots | None:
    """Slots [lanes] to retain before `tokens` more are computed; None if no eviction is due.

    With `when=pressure` no eviction is due here: see `over_cap`.
    """
    spec, done = request.eviction.spec, request.progress.num_computed
    prompt_tokens = len(request.prompt_token_ids)
    if spec.cap is None or spec.when == PRESSURE:
        return None
    if spec.when == PREFILL_END:
        if done != prompt_tokens:
            return None
        tokens = 0  # the cap does not include later tokens
    elif spec.when == DECODE and done < prompt_tokens:
        return None
    return _at_capacity(spec, lanes, held_slots(lanes, request), tokens)


def division_is_due(request: Request, lanes: EvictingLanes, tokens: int) -> bool:
    """Whether the caps of a request's lanes are to be set before `tokens` more are computed.

    With `when=pressure` they are set when the request evicts: see `over_cap`.
    """
    spec = request.eviction.spec
    if not request.eviction.pending or spec.when == PRESSURE:
        return False
    if request.progress.num_computed >= len(request.prompt_token_ids):
        return True
    return spec.divided and slots_to_keep(request, lanes, tokens) is not None


def note_division(request: Request) -> None:
    """Record that the caps of a request's lanes were set from the tokens computed so far."""
    done = request.progress.num_computed
    request.eviction.divided_tokens = done
    request.eviction.pending = done < len(request.prompt_token_ids)


def over_cap(request: Request, lanes: EvictingLanes, tokens: int = 0) -> Slots | None:
    """Slots [lanes] to retain under memory pressure; None if no lane is above its cap.

    Args:
        request: a running request.
        lanes: the lanes that evict tokens.
        tokens: number of next tokens; with 1, lanes at their cap count as above it.
    """
    if request.eviction.spec.cap is None:
        return None
    return _at_capacity(request.eviction.spec, lanes, held_slots(lanes, request), tokens)


def needs_page(request: Request, lanes: EvictingLanes) -> bool:
    """Whether some lane has no free slot for the next token in its pages."""
    return bool(np.any(held_slots(lanes, request) % lanes.page_tokens == 0))


def _at_capacity(
    spec: EvictionSpec, lanes: EvictingLanes, held: Slots, tokens: int
) -> Slots | None:
    caps, per_layer = lane_capacities(spec, len(held)), lanes.lanes_per_layer
    if spec.ragged:
        layers, most = held.reshape(-1, per_layer), caps.reshape(-1, per_layer)
        over = layers.sum(axis=1) + tokens * per_layer > most.sum(axis=1)
        if not over.any():
            return None
        down = np.where(over[:, None], most - spec.leaving, layers)
        return np.stack([_fitted(*of_layer) for of_layer in zip(down, layers, strict=True)]).ravel()
    over = held + tokens > caps
    return np.where(over, caps - spec.leaving, held) if over.any() else None


def _fitted(keep: Slots, held: Slots) -> Slots:
    """Limit `keep` to the slots that each lane holds; distribute the difference over the others."""
    fitted = np.minimum(keep, held)
    missing = int(keep.sum() - fitted.sum())
    while missing > 0:
        free = held - fitted
        if not free.any():
            break
        share = np.minimum(free, -(-missing // int(np.count_nonzero(free))))
        share -= np.maximum(0, np.cumsum(share) - missing).clip(max=share)
        fitted += share
        missing -= int(share.sum())
    return fitted


def repeats_later(request: Request) -> bool:
    """Whether evictions of an earlier run are still to be replayed after the computed tokens.

    Until then no other token is evicted.
    """
    trace = request.eviction.trace
    return (
        request.eviction.replayed < len(trace)
        and trace[-1].num_computed > request.progress.num_computed
    )


def has_atomic_chunk(request: Request) -> bool:
    """Whether the next chunk must be computed as a whole, after an eviction."""
    spec, done = request.eviction.spec, request.progress.num_computed
    if not spec.evicts_during_prefill or repeats_later(request):
        return False
    return spec.least_cap <= done < len(request.prompt_token_ids)


def lookahead(request: Request) -> int:
    """Tokens for which an eviction frees slots."""
    if not has_atomic_chunk(request):
        return 1
    return min(
        request.eviction.spec.every, len(request.prompt_token_ids) - request.progress.num_computed
    )


def free_tokens(request: Request, lanes: EvictingLanes | None) -> int:
    """Tokens that a request may compute at once, after the eviction that is due before them.

    With these chunks, recomputed output tokens find the same lanes as before the preemption.
    """
    if lanes is None or request.eviction.spec.cap is None:
        return UNLIMITED
    replay = _to_next_replay(request)
    if replay is not None:
        return replay
    spec, done = request.eviction.spec, request.progress.num_computed
    to_prompt_end = len(request.prompt_token_ids) - done
    if has_atomic_chunk(request):
        return lookahead(request)
    if to_prompt_end > 0:
        first = spec.least_cap - done if spec.when == PREFILL_AND_DECODE else UNLIMITED
        return min(first, to_prompt_end if spec.when != PRESSURE else UNLIMITED)
    if spec.when in (PREFILL_END, PRESSURE):
        return UNLIMITED
    return _free_slots(request, lanes)


def _to_next_replay(request: Request) -> int | None:
    """Tokens until the next replayed eviction that is not due yet; None if there is none."""
    for entry in request.eviction.trace[request.eviction.replayed :]:
        if entry.num_computed > request.progress.num_computed:
            return entry.num_computed - request.progress.num_computed
    return None


def _free_slots(request: Request, lanes: EvictingLanes) -> int:
    keep = slots_to_keep(request, lanes, 1)
    held = held_slots(lanes, request) if keep is None else keep
    free = lane_capacities(request.eviction.spec, len(held)) - held
    if request.eviction.spec.ragged:
        per_layer = lanes.lanes_per_layer
        free = free.reshape(-1, per_layer).sum(axis=1) // per_layer
    return max(1, int(free.min()))
