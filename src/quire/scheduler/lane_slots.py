"""How many more tokens the lanes of a sequence take, and how many slots they must give up for them.

A lane that holds h slots and would hold more than its cap with the next t tokens goes down to its
cap less `leaving`. Where a budget moves slots between the heads of a layer, layers are asked, not
lanes. Torch-free; which slots leave is chosen elsewhere.
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
    """The table whose lanes lose tokens; None where none do."""
    tables = memory.tables.values()
    return next((t for t in tables if not t.group.ordered and not t.group.private), None)


def held_slots(table: LaneTable, request: Request) -> Slots:
    """Slots [lanes] of a running request."""
    held: Slots = table.num_slots[request.memory.row].astype(np.int64)
    return held


def lane_caps(spec: EvictionSpec, lanes: int) -> Slots:
    """Cap [lanes] of each lane of a table; one that serves several heads has the least of theirs.

    Args:
        spec: has a cap.
        lanes: of the table.
    """
    assert spec.cap is not None, "asked of requests that evict"
    return _caps(spec.cap, spec.lane_caps, lanes)


@lru_cache(maxsize=1024)
def _caps(cap: int, by_head: tuple[int, ...] | None, lanes: int) -> Slots:
    if by_head is None:
        caps = np.full(lanes, cap, dtype=np.int64)
    else:
        caps = np.array(by_head, dtype=np.int64).reshape(lanes, -1).min(axis=1)
    caps.setflags(write=False)
    return caps


# ---- what must leave -----------------------------------------------------------------------------


def slots_to_keep(request: Request, table: LaneTable, tokens: int) -> Slots | None:
    """Slots [lanes] that stay before `tokens` more are processed; None where nothing must leave.

    Under the schedule `pressure` nothing must: see `over_cap`.
    """
    spec, done = request.eviction.spec, request.progress.num_computed
    prompt_tokens = len(request.prompt_token_ids)
    if spec.cap is None or spec.when == PRESSURE:
        return None
    if spec.when == PREFILL_END:
        if done != prompt_tokens:
            return None
        tokens = 0  # later tokens come on top
    elif spec.when == DECODE and done < prompt_tokens:
        return None
    return _at_capacity(spec, table, held_slots(table, request), tokens)


def over_cap(request: Request, table: LaneTable, tokens: int = 0) -> Slots | None:
    """Slots [lanes] that stay where room is short; None where no lane is over its cap.

    Args:
        request: a running one.
        table: of lanes that lose tokens.
        tokens: that will come: with one, lanes that are full are over their cap too.
    """
    if request.eviction.spec.cap is None:
        return None
    return _at_capacity(request.eviction.spec, table, held_slots(table, request), tokens)


def wants_page(request: Request, table: LaneTable) -> bool:
    """Whether some lane has no slot left for the next token in the pages it has."""
    return bool(np.any(held_slots(table, request) % table.group.page_class.tokens == 0))


def _at_capacity(spec: EvictionSpec, table: LaneTable, held: Slots, tokens: int) -> Slots | None:
    caps, lanes = lane_caps(spec, len(held)), table.group.lanes_per_layer
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
    """As many slots as `keep` says, but of no lane more than it holds: others take what is left."""
    fitted = np.minimum(keep, held)
    missing = int(keep.sum() - fitted.sum())
    while missing > 0:
        room = held - fitted
        if not room.any():
            break
        share = np.minimum(room, -(-missing // int(np.count_nonzero(room))))
        share -= np.maximum(0, np.cumsum(share) - missing).clip(max=share)
        fitted += share
        missing -= int(share.sum())
    return fitted


# ---- what may come -------------------------------------------------------------------------------


def repeats_later(request: Request) -> bool:
    """Whether evictions of an earlier run are still to be repeated behind the tokens read so far.

    Until then nothing else leaves.
    """
    trace = request.eviction.trace
    return (
        request.eviction.replayed < len(trace)
        and trace[-1].num_computed > request.progress.num_computed
    )


def in_blocks(request: Request) -> bool:
    """Whether the next tokens are a block: read whole, behind an eviction, or not at all."""
    spec, done = request.eviction.spec, request.progress.num_computed
    if not spec.prefills_in_blocks or repeats_later(request):
        return False
    return spec.least_cap <= done < len(request.prompt_token_ids)


def lookahead(request: Request) -> int:
    """Tokens that room is made for when a request's lanes are asked to give up some."""
    if not in_blocks(request):
        return 1
    return min(
        request.eviction.spec.every, len(request.prompt_token_ids) - request.progress.num_computed
    )


def room_tokens(request: Request, table: LaneTable | None) -> int:
    """Tokens a request may read at once, an eviction before them included.

    Read so, tokens that were answers before a preemption find the lanes as they were then.
    """
    if table is None or request.eviction.spec.cap is None:
        return UNLIMITED
    replay = _to_next_replay(request)
    if replay is not None:
        return replay
    spec, done = request.eviction.spec, request.progress.num_computed
    to_answer = len(request.prompt_token_ids) - done
    if in_blocks(request):
        return lookahead(request)
    if to_answer > 0:
        first = spec.least_cap - done if spec.when == PREFILL_AND_DECODE else UNLIMITED
        return min(first, to_answer if spec.when != PRESSURE else UNLIMITED)
    if spec.when in (PREFILL_END, PRESSURE):
        return UNLIMITED
    return _room_in_lanes(request, table)


def _to_next_replay(request: Request) -> int | None:
    """Tokens up to the next eviction that is repeated and not due yet; None where none is left."""
    for entry in request.eviction.trace[request.eviction.replayed :]:
        if entry.num_computed > request.progress.num_computed:
            return entry.num_computed - request.progress.num_computed
    return None


def _room_in_lanes(request: Request, table: LaneTable) -> int:
    keep = slots_to_keep(request, table, 1)
    left = held_slots(table, request) if keep is None else keep
    room = lane_caps(request.eviction.spec, len(left)) - left
    if request.eviction.spec.ragged:
        lanes = table.group.lanes_per_layer
        room = room.reshape(-1, lanes).sum(axis=1) // lanes
    return max(1, int(room.min()))
