"""Tenants and totals of an engine: quotas, counters and latencies."""

import base64
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quire.engine.inspection.request_log import FinishedRequest
from quire.engine.inspection.requests import num_waiting
from quire.kv.page_map import (
    CACHED,
    EVICTED,
    FIRST_ROW,
    SHARED,
    PageFacts,
    read_pages,
)
from quire.scheduler.fairness import OTHERS
from quire.tenancy.accounts import bytes_by_tenant

if TYPE_CHECKING:
    from quire.engine.core import Engine

Snapshot = dict[str, Any]
Point = tuple[float | int | None, ...]
"""Values of `HISTORY_COLUMNS`."""

MAX_CELLS = 100_000
"""Largest number of cells of a map; of more pages, every n-th is shown."""
_LONGEST_RUN = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class PageOwners:
    """A copy of the page map and of the names of its owners."""

    facts: PageFacts
    owners: list[Snapshot]  # request id and tenant of each row, in the order of the owners' numbers
    groups: list[list[str]]  # lane groups by page class, in the order of `facts.classes`
    totals: Snapshot  # bytes outside the map: of CPU memory and of the whole arena

    def encode(self, max_cells: int = MAX_CELLS, *, with_map: bool = True) -> Snapshot:
        """The page map as JSON values; runs of equal cells are base64 of little-endian arrays."""
        owner, state, kind = self.facts.in_order()
        sizes = np.array([c.page_class.page_bytes for c in self.facts.classes], dtype=np.int64)
        body = {
            "num_pages": len(owner),
            "page_classes": [self._class(i) for i in range(len(self.facts.classes))],
            "owners": self._owners(owner, sizes[kind]),
            "states": self._states(owner, state, kind, sizes),
            **self.totals,
        }
        if with_map:
            every = max(1, -(-len(owner) // max_cells))
            body["pages_per_cell"] = every
            body["runs"] = _runs(owner[::every], state[::every], kind[::every])
        return body

    def _class(self, index: int) -> Snapshot:
        one = self.facts.classes[index]
        return {
            "codec": one.codec,
            "quantized": not one.page_class.is_plain,
            "page_tokens": one.page_class.tokens,
            "page_bytes": one.page_class.page_bytes,
            "groups": self.groups[index],
        }

    def _owners(self, owner: NDArray[np.uint16], size: NDArray[np.int64]) -> list[Snapshot]:
        count = np.bincount(owner, minlength=FIRST_ROW + len(self.owners))
        held = np.bincount(owner, weights=size, minlength=len(count)).astype(np.int64)
        names = [{"kind": "free"}, {"kind": "prefix_cache"}, *self.owners]
        return [
            {"owner": number, **name, "pages": int(count[number]), "bytes": int(held[number])}
            for number, name in enumerate(names)
        ]

    def _states(
        self,
        owner: NDArray[np.uint16],
        state: NDArray[np.uint8],
        kind: NDArray[np.uint8],
        sizes: NDArray[np.int64],
    ) -> Snapshot:
        """Bytes of pages in use by state; the first three add up to them, the others overlap."""
        used = owner > 0
        plain = np.array([c.page_class.is_plain for c in self.facts.classes])[kind]
        size = np.where(used, sizes[kind], 0)
        evicted = state & EVICTED > 0

        def total(mask: NDArray[np.bool_]) -> int:
            return int(size[mask].sum())

        return {
            "exact": total(plain & ~evicted),
            "evicted": total(evicted),
            "quantized": total(~plain & ~evicted),
            "shared": total(state & SHARED > 0),
            "cached": total((state & CACHED > 0) | (owner == 1)),
        }


def read_page_map(engine: "Engine", tenant: str | None) -> PageOwners:
    """Copy the page map; of a tenant without gaps, which would reveal the use of other tenants."""
    memory = engine.pool.kv.memory
    running = [r for r in engine.scheduler.running if tenant in (None, r.tenant)]
    rows = [request.memory.row for request in running]
    owners: list[Snapshot] = [
        {"kind": "request", "request_id": r.request_id, "tenant": r.tenant} for r in running
    ]
    groups = memory.layout.groups
    return PageOwners(
        facts=read_pages(memory, rows, only_these=tenant is not None),
        owners=owners,
        groups=[[g.name for g in groups if g.page_class == c] for c in memory.pools],
        totals={} if tenant is not None else _totals(engine),
    )


def _totals(engine: "Engine") -> Snapshot:
    memory, pool = engine.pool.kv.memory, engine.pool
    offload = {} if pool.offload is None else pool.offload.totals()
    host = pool.host
    return {
        "total_bytes": memory.total_bytes,
        "free_bytes": memory.free_bytes,
        "swap": {
            "total_bytes": 0 if host is None else host.total_bytes,
            "used_bytes": 0 if host is None else host.used_bytes,
        },
        "offload": {
            "total_bytes": 0 if pool.offload is None else pool.offload.offload_bytes,
            "used_bytes": offload.get("offloaded_bytes", 0) + offload.get("activation_bytes", 0),
        },
    }


def _runs(owner: NDArray[np.uint16], state: NDArray[np.uint8], kind: NDArray[np.uint8]) -> Snapshot:
    """Run-length encoding of the cells; a run has at most 65,535 cells."""
    if not len(owner):
        return {"count": "", "owner": "", "state": "", "page_class": ""}
    changed = (owner[1:] != owner[:-1]) | (state[1:] != state[:-1]) | (kind[1:] != kind[:-1])
    first = np.concatenate([[0], np.flatnonzero(changed) + 1])
    first = np.union1d(first, np.arange(0, len(owner), _LONGEST_RUN))
    count = np.diff(first, append=len(owner)).astype("<u2")
    return {
        "count": _base64(count),
        "owner": _base64(owner[first].astype("<u2")),
        "state": _base64(state[first]),
        "page_class": _base64(kind[first]),
    }


def _base64(numbers: NDArray[Any]) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")


WINDOW_S = 60.0
"""Seconds of finished requests that latencies are computed from."""
PERCENTILES = (50, 90, 99)


def tenant_rows(engine: "Engine", tenant: str | None) -> list[Snapshot]:
    """Rows of all tenants, or of one without its share, which depends on the others."""
    scheduler = engine.scheduler
    accounts, rows_of = scheduler.fairness.accounts, defaultdict[str, list[int]](list)
    for request in scheduler.running:
        rows_of[request.tenant].append(request.memory.row)
    used = bytes_by_tenant(engine.pool.kv.memory, rows_of)
    rows = []
    for served in scheduler.fairness.report(scheduler.running):
        if tenant not in (None, served.tenant):
            continue
        spec = None if served.tenant == OTHERS else accounts.spec(served.tenant)
        rows.append(
            {
                **asdict(served),
                "share_bytes": None if tenant is not None else served.share_bytes,
                "used_bytes": used.get(served.tenant, 0),
                "weight": None if spec is None else spec.weight,
                "burst_bytes": None if spec is None else spec.burst_bytes,
                "limit_bytes": None if spec is None else spec.limit_bytes,
                "num_running": len(rows_of[served.tenant]),
                "num_waiting": num_waiting(engine, served.tenant),
            }
        )
    return rows


def overview(engine: "Engine", tenant: str | None) -> Snapshot:
    """Counters, latencies and memory of an engine, or of one tenant, as JSON values."""
    numbers = _of_engine(engine)
    if tenant is not None:
        [row] = tenant_rows(engine, tenant) or [{}]
        numbers = _of_tenant(row)
    return numbers | {"latency": _recent_latencies(engine, tenant)}


def _recent_latencies(engine: "Engine", tenant: str | None) -> Snapshot:
    since_s = engine.events.now_s() - WINDOW_S
    own = (one for one in engine.request_log.finished if tenant in (None, one.tenant))
    return latencies([one for one in own if one.finish_s >= since_s])


HISTORY_INTERVAL_S, HISTORY_POINTS = 1.0, 180
HISTORY_COLUMNS = (
    *("time_s", "num_running", "num_waiting", "requests_bytes", "generated_tokens"),
    *("ttft_p50_s", "ttft_p90_s"),
)


def history_points(engine: "Engine", *, by_tenant: bool) -> dict[str | None, Point]:
    """A point of the charts for the engine (None), and for each tenant if they are told apart."""
    found: dict[str | None, Snapshot] = {None: _of_engine(engine)}
    if by_tenant:
        found |= {row["tenant"]: _of_tenant(row) for row in tenant_rows(engine, None)}
    now_s, points = engine.events.now_s(), dict[str | None, Point]()
    for tenant, one in found.items():
        ttft = _recent_latencies(engine, tenant)["ttft_s"] or {}
        counts = (now_s, one["num_running"], one["num_waiting"])
        sums = (one["memory"]["requests_bytes"], one["counters"]["generated_tokens"])
        points[tenant] = (*counts, *sums, ttft.get("p50"), ttft.get("p90"))
    return points


def _of_engine(engine: "Engine") -> Snapshot:
    memory, scheduler = engine.pool.kv.memory, engine.scheduler
    cached_bytes = memory.listeners.idle_bytes()
    prefix, swapper = scheduler.sequence_memory.prefix, scheduler.preempter.swapper
    return {
        "memory": {
            "total_bytes": memory.total_bytes,
            "requests_bytes": sum(p.used_bytes for p in memory.pools.values()) - cached_bytes,
            "cached_bytes": cached_bytes,
            "border_bytes": sum(pool.tail_bytes for pool in memory.pools.values()),
            "free_bytes": memory.free_bytes,
            "peak_bytes": memory.arena_peak_bytes,
        },
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "counters": {
            "generated_tokens": engine.num_generated_tokens,
            "processed_tokens": engine.num_processed_tokens,
            "steps": engine.num_steps,
            "preemptions": scheduler.num_preemptions,
            "evictions": scheduler.capacities.num_evictions,
            "evicted_tokens": round(scheduler.capacities.evicted_tokens),
            "swaps": 0 if swapper is None else swapper.num_swaps,
            "queried_tokens": 0 if prefix is None else prefix.queried_tokens,
            "cached_tokens": 0 if prefix is None else prefix.hit_tokens,
            "events": engine.events.num_events,
        },
    }


def _of_tenant(row: Snapshot) -> Snapshot:
    return {
        "memory": {
            "requests_bytes": row.get("used_bytes", 0),
            "limit_bytes": row.get("limit_bytes"),
        },
        "num_running": row.get("num_running", 0),
        "num_waiting": row.get("num_waiting", 0),
        "counters": {
            "generated_tokens": row.get("output_tokens", 0),
            "processed_tokens": row.get("prompt_tokens", 0) + row.get("output_tokens", 0),
            "preemptions": row.get("num_preemptions", 0),
            "cached_tokens": row.get("cached_tokens", 0),
        },
    }


def latencies(finished: Sequence[FinishedRequest]) -> Snapshot:
    """Percentiles of time to first token, time per further token, and duration, in seconds."""
    started = [one for one in finished if one.first_token_s]
    further = [one for one in started if one.output_tokens > 1]
    return {
        "window_s": WINDOW_S,
        "finished": len(finished),
        "ttft_s": _percentiles([one.first_token_s - one.arrival_s for one in started]),
        "itl_s": _percentiles(
            [(one.finish_s - one.first_token_s) / (one.output_tokens - 1) for one in further]
        ),
        "e2e_s": _percentiles([one.finish_s - one.arrival_s for one in finished]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    found = np.percentile(seconds, PERCENTILES)
    return {f"p{p}": round(float(s), 6) for p, s in zip(PERCENTILES, found, strict=True)}
