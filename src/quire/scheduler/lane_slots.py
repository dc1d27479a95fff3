"""Slot counts of lanes: how many tokens fit, and how many slots must be evicted for them.

A lane whose slots plus the next tokens would exceed its cap is evicted to its cap minus `leaving`.
If a budget moves slots between the heads of a layer, the sums over layers are compared instead of
lanes. Torch-free; the eviction policy selects the slots.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.tables import LaneTable
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


def evicting_table(memory: KVMemory) -> LaneTable | None:
    """The page table whose lanes evict tokens; None if no lane does."""
    tables = memory.tables.values()
    return next((t for t in tables if not t.group.ordered and not t.group.private), None)


def held_slots(table: LaneTable, request: Request) -> Slots:
    """Slots [lanes] that a running request holds."""
    held: Slots = table.num_slots[request.memory.row].astype(np.int64)
    return held


def lane_capacities(spec: EvictionSpec, lanes: int) -> Slots:
    """Cap [lanes] of each lane of a table; a lane with several heads has their lowest cap.

    Args:
        spec: an eviction specification with a cap.
        lanes: number of lanes of the table.
    """
    assert spec.cap is not None, "only for requests that evict"
    return _caps(spec.cap, spec.lane_capacities, lanes)


@lru_cache(maxsize=1024)
def _caps(cap: int, by_head: tuple[int, ...] | None, lanes: int) -> Slots:
    if by_head is None:
        caps = np.full(lanes, cap, dtype=np.int64)
    else:
        caps = np.array(by_head, dtype=np.int64).reshape(lanes, -1).min(axis=1)
    caps.setflags(write=False)
    return caps


# ---- evictions that are due ----------------------------------------------------------------------


def slots_to_keep(request: Request, table: LaneTable, tokens: int) -> Slots | None:
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
    return _at_capacity(spec, table, held_slots(table, request), tokens)


def division_is_due(request: Request, table: LaneTable, tokens: int) -> bool:
    """Whether the caps of a request's lanes are to be set before `tokens` more are computed.

    With `when=pressure` they are set when the request evicts: see `over_cap`.
    """
    spec = request.eviction.spec
    if not request.eviction.pending or spec.when == PRESSURE:
        return False
    if request.progress.num_computed >= len(request.prompt_token_ids):
        return True
    return spec.divided and slots_to_keep(request, table, tokens) is not None


def note_division(request: Request) -> None:
    """Record that the caps of a request's lanes were set from the tokens computed so far."""
    done = request.progress.num_computed
    request.eviction.divided_tokens = done
    request.eviction.pending = done < len(request.prompt_token_ids)


def over_cap(request: Request, table: LaneTable, tokens: int = 0) -> Slots | None:
    """Slots [lanes] to retain under memory pressure; None if no lane is above its cap.

    Args:
        request: a running request.
        table: the table of evicting lanes.
        tokens: number of next tokens; with 1, lanes at their cap count as above it.
    """
    if request.eviction.spec.cap is None:
        return None
    return _at_capacity(request.eviction.spec, table, held_slots(table, request), tokens)


def needs_page(request: Request, table: LaneTable) -> bool:
    """Whether some lane has no free slot for the next token in its pages."""
    return bool(np.any(held_slots(table, request) % table.group.page_class.tokens == 0))


def _at_capacity(spec: EvictionSpec, table: LaneTable, held: Slots, tokens: int) -> Slots | None:
    caps, lanes = lane_capacities(spec, len(held)), table.group.lanes_per_layer
    if spec.ragged:
        layers, most = held.reshape(-1, lanes), caps.reshape(-1, lanes)
        over = layers.sum(axis=1) + tokens * lanes > most.sum(axis=1)
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


# ---- tokens until the next eviction --------------------------------------------------------------


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


def free_tokens(request: Request, table: LaneTable | None) -> int:
    """Tokens that a request may compute at once, after the eviction that is due before them.

    With these chunks, recomputed output tokens find the same lanes as before the preemption.
    """
    if table is None or request.eviction.spec.cap is None:
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
    return _free_slots(request, table)


def _to_next_replay(request: Request) -> int | None:
    """Tokens until the next replayed eviction that is not due yet; None if there is none."""
    for entry in request.eviction.trace[request.eviction.replayed :]:
        if entry.num_computed > request.progress.num_computed:
            return entry.num_computed - request.progress.num_computed
    return None


def _free_slots(request: Request, table: LaneTable) -> int:
    keep = slots_to_keep(request, table, 1)
    held = held_slots(table, request) if keep is None else keep
    free = lane_capacities(request.eviction.spec, len(held)) - held
    if request.eviction.spec.ragged:
        lanes = table.group.lanes_per_layer
        free = free.reshape(-1, lanes).sum(axis=1) // lanes
    return max(1, int(free.min()))
