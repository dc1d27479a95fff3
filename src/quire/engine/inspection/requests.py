"""Open and recently finished requests: state, bytes, why they wait, and their timelines."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.inspection.request_log import FinishedRequest, RequestTimeline
from quire.engine.pool import KVPool
from quire.kv.lane_reader import stored_positions
from quire.kv.memory import KVMemory
from quire.layout.pages import LaneGroup
from quire.layout.sparse import OFF
from quire.scheduler.events import KVEvent
from quire.scheduler.request import Request
from quire.scheduler.waiting import Waiting

if TYPE_CHECKING:
    from quire.engine.core import Engine


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """Logical positions of the slots of one lane group."""

    group: LaneGroup
    # [lanes, slots] in storage order; undefined past a lane's last slot
    positions: NDArray[np.int32]
    num_slots: NDArray[np.int32]  # [lanes]

    def mask(self, tokens: int) -> NDArray[np.bool_]:
        """Mask [lanes, tokens] of the retained tokens."""
        retained = np.zeros((len(self.positions), tokens), dtype=bool)
        live = np.arange(self.positions.shape[1]) < self.num_slots[:, None]
        live &= self.positions < tokens
        (index,) = np.nonzero(live.reshape(-1))
        lane = index // max(1, self.positions.shape[1])
        retained[lane, self.positions.reshape(-1)[index]] = True
        return retained


@dataclass(frozen=True, slots=True)
class Retention:
    """A copy of a request's tokens and of the positions in its lanes."""

    token_ids: list[int]  # prompt and output so far
    prompt_tokens: int
    num_computed: int  # tokens whose KV was computed in this run; evicted ones count
    groups: tuple[GroupPositions, ...]  # empty while the request has no KV in the arena

    @property
    def lanes(self) -> list[dict[str, object]]:
        """Layer and first and last KV head of every lane, in the order of `mask`."""
        return [lane for found in self.groups for lane in _lanes(found.group)]

    def mask(self) -> NDArray[np.bool_]:
        """Mask [lanes, computed tokens] of the retained tokens."""
        if not self.groups:
            return np.zeros((0, self.num_computed), dtype=bool)
        return np.concatenate([found.mask(self.num_computed) for found in self.groups])


def _lanes(group: LaneGroup) -> Iterator[dict[str, object]]:
    heads = group.page_class.heads
    for layer in group.layers:
        for lane in range(group.lanes_per_layer):
            first = lane * heads
            yield {
                "group": group.name,
                "layer": layer,
                "first_head": first,
                "last_head": first + heads - 1,
            }


def read_retention(pool: KVPool, request: Request) -> Retention:
    """Copy the tokens of an open request and the positions in its lanes."""
    row = request.memory.row
    tables = pool.kv.memory.tables.values()
    groups = [table.group for table in tables if not table.group.private] if row >= 0 else []
    return Retention(
        token_ids=request.token_ids(0, request.num_tokens),
        prompt_tokens=len(request.prompt_token_ids),
        num_computed=request.progress.num_computed,
        groups=tuple(_read_group(pool, group, row) for group in groups),
    )


def _read_group(pool: KVPool, group: LaneGroup, row: int) -> GroupPositions:
    positions = stored_positions(pool.kv, group.name, row)
    if pool.offload is not None:
        tokens = group.page_class.tokens
        for pages in pool.offload.prefixes.page_groups(row, group.name):
            found, first = pages.positions(tokens), pages.first * tokens
            if found is not None:
                positions[:, first : first + pages.columns * tokens] = found
    return GroupPositions(group, positions, pool.kv.memory.tables[group.name].num_slots[row].copy())


Row = dict[str, Any]


def request_rows(engine: "Engine", tenant: str | None, most: int) -> Row:
    """Rows of open and newest finished requests of a tenant; at most `most` of each kind."""
    scheduler = engine.scheduler
    running = [r for r in scheduler.running if tenant in (None, r.tenant)]
    waiting = islice(scheduler.waiting_causes.first(most, tenant), most)
    finished = [f for f in reversed(engine.request_log.finished) if tenant in (None, f.tenant)]
    return {
        "running": [open_row(engine, request) for request in running[:most]],
        "waiting": [open_row(engine, request, _waiting(why, tenant)) for request, why in waiting],
        "finished": [finished_row(one) for one in finished[:most]],
        "num_running": len(running),
        "num_waiting": num_waiting(engine, tenant),
    }


def num_waiting(engine: "Engine", tenant: str | None) -> int:
    """Number of waiting requests, of one tenant or (None) of all."""
    queue = engine.scheduler.waiting
    return len(queue) if tenant is None else queue.num_waiting(tenant)


def find_request(engine: "Engine", request_id: str, tenant: str | None) -> Request | None:
    """Find an open request of a tenant; None if there is none with this id."""
    found = (r for r in engine.requests() if r.request_id == request_id)
    return next((r for r in found if tenant in (None, r.tenant)), None)


def one_request(engine: "Engine", request_id: str, tenant: str | None) -> Row | None:
    """Numbers and timeline of an open or recently finished request; None if it is unknown."""
    request = find_request(engine, request_id, tenant)
    if request is not None:
        why = _why(engine, request)
        row = open_row(engine, request, None if why is None else _waiting(why, tenant))
        return row | _timeline(engine, engine.request_log.timeline(request_id), row["arrival_s"])
    for one in reversed(engine.request_log.finished):
        if one.request_id == request_id and tenant in (None, one.tenant):
            return finished_row(one) | _timeline(engine, one.timeline, one.arrival_s)
    return None


def _why(engine: "Engine", request: Request) -> Waiting | None:
    if request.is_running:
        return None
    causes = engine.scheduler.waiting_causes
    queued = causes.first(len(engine.scheduler.waiting), request.tenant)
    group = request.group
    return next(
        (why for one, why in queued if one is request or (group and one.group is group)), None
    )


def _timeline(engine: "Engine", timeline: RequestTimeline | None, arrival_s: float) -> Row:
    events = [] if timeline is None else timeline.events
    return {
        "codec": engine.pool.codec,
        "timeline": list(_with_waits(events, arrival_s)),
        "num_events": 0 if timeline is None else timeline.num_events,
    }


def _with_waits(events: Iterable[KVEvent], arrival_s: float) -> Iterator[Row]:
    """Events as JSON values; an admission has the seconds that the request waited before it."""
    queued_s: float | None = arrival_s
    for event in events:
        shown: Row = event.as_dict()
        if event.kind == "admitted" and queued_s is not None:
            shown["waited_s"] = event.time_s - queued_s
            queued_s = None
        elif event.kind in ("freed", "preempted", "swapped_out"):  # it waits, or has finished
            queued_s = event.time_s
        yield shown


def open_row(engine: "Engine", request: Request, waiting: Row | None = None) -> Row:
    """Numbers of an open request as JSON values."""
    progress, eviction, memory = request.progress, request.eviction, request.memory
    kv, group = engine.pool.kv.memory, request.group or request.split_from
    runs = memory.row >= 0
    return {
        "request_id": request.request_id,
        "group": request.request_id if group is None else group.request_id,
        "tenant": request.tenant,
        "state": progress.state.value,
        "waiting": waiting,
        "priority": request.priority,
        "prompt_tokens": len(request.prompt_token_ids),
        "output_tokens": len(request.output_token_ids),
        "max_tokens": request.params.max_tokens,
        "computed_tokens": progress.num_computed,
        "cached_tokens": progress.cached_tokens,
        "retained_tokens": round(retained_tokens(kv, memory.row), 2) if runs else 0,
        "kv_bytes": kv.row_bytes(memory.row) if runs else 0,
        "kv_peak_bytes": _peak_bytes(kv, request),
        "host_bytes": 0 if memory.swapped is None else memory.swapped.num_bytes,
        "offloaded_bytes": _offloaded_bytes(engine.pool, memory.row),
        "evict": request.spec.evict,
        "sparse": OFF if request.spec.sparse is None else request.spec.sparse.text,
        "exact": eviction.exact,
        "num_evictions": eviction.num_evictions,
        "evicted_tokens": round(eviction.evicted_tokens, 2),
        "num_preemptions": progress.num_preemptions,
        "finish_reason": None,
        **_times(request.spec.arrival_s, progress.first_token_s, 0.0),
    }


def finished_row(one: FinishedRequest) -> Row:
    """Numbers of a finished request, with the keys of `open_row`."""
    return {
        "request_id": one.request_id,
        "group": one.group,
        "tenant": one.tenant,
        "state": "finished",
        "waiting": None,
        "priority": one.priority,
        "prompt_tokens": one.prompt_tokens,
        "output_tokens": one.output_tokens,
        "max_tokens": one.max_tokens,
        "computed_tokens": 0,
        "cached_tokens": one.cached_tokens,
        "retained_tokens": 0,
        "kv_bytes": 0,
        "kv_peak_bytes": one.kv_peak_bytes,
        "host_bytes": 0,
        "offloaded_bytes": 0,
        "evict": one.evict,
        "sparse": one.sparse,
        "exact": not one.num_evictions,
        "num_evictions": one.num_evictions,
        "evicted_tokens": round(one.evicted_tokens, 2),
        "num_preemptions": one.num_preemptions,
        "finish_reason": one.finish_reason,
        **_times(one.arrival_s, one.first_token_s, one.finish_s),
    }


def _waiting(why: Waiting, tenant: str | None) -> Row:
    """Cause of waiting; for one tenant without the bytes and requests of the others."""
    after = why.after if tenant is None or (why.after and why.after.tenant == tenant) else None
    return {
        "cause": why.cause,
        "ahead": why.ahead,
        "needed_bytes": why.needed_bytes,
        "promised_bytes": why.promised_bytes if tenant is None else None,
        "free_bytes": why.free_bytes if tenant is None else None,
        "after": None if after is None else after.request_id,
    }


def _times(arrival_s: float, first_token_s: float, finish_s: float) -> Mapping[str, float | None]:
    """Times on the engine's clock; None for what has not happened."""
    return {
        "arrival_s": arrival_s,
        "first_token_s": first_token_s or None,
        "finish_s": finish_s or None,
    }


def retained_tokens(memory: KVMemory, row: int) -> float:
    """Tokens that a lane of a row retains, mean over the lanes of keys and values."""
    slots = [t.num_slots[row] for t in memory.tables.values() if not t.group.private]
    lanes = sum(len(lane_slots) for lane_slots in slots)
    return float(sum(int(lane_slots.sum()) for lane_slots in slots)) / max(1, lanes)


def _peak_bytes(memory: KVMemory, request: Request) -> int:
    row = request.memory.row
    now = 0 if row < 0 else int(memory.peak_bytes[row])
    return max(request.memory.kv_peak_bytes, now)


def _offloaded_bytes(pool: KVPool, row: int) -> int:
    return 0 if pool.offload is None or row < 0 else pool.offload.prefixes.row_bytes(row)
