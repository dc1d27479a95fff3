"""Tenants and totals of an engine: quotas, counters and latencies."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.engine.inspection.request_log import FinishedRequest
from quire.engine.inspection.requests import num_waiting
from quire.tenancy.meter import OTHERS
from quire.tenancy.page_owners import bytes_by_tenant

if TYPE_CHECKING:
    from quire.engine.core import Engine

Snapshot = dict[str, Any]

WINDOW_S = 60.0
"""Seconds of finished requests that latencies are computed from."""
PERCENTILES = (50, 90, 99)


def tenant_rows(engine: "Engine", tenant: str | None) -> list[Snapshot]:
    """Quota, use and counters of each tenant, as JSON values.

    Args:
        engine: the engine, between two steps.
        tenant: only this tenant, without its share, which depends on other tenants; None: all.
    """
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
    """Counters, latencies and memory of an engine, or of one tenant, as JSON values.

    Args:
        engine: the engine, between two steps.
        tenant: only numbers of this tenant; None: of the engine.
    """
    now_s = engine.events.now_s()
    finished = [
        one
        for one in engine.request_log.finished
        if tenant in (None, one.tenant) and one.finish_s >= now_s - WINDOW_S
    ]
    numbers = _of_engine(engine) if tenant is None else _of_tenant(engine, tenant)
    return numbers | {"latency": latencies(finished)}


def _of_engine(engine: "Engine") -> Snapshot:
    memory, scheduler = engine.pool.kv.memory, engine.scheduler
    cached_bytes = memory.listeners.idle_bytes()
    prefix, swapper = scheduler.sequence_memory.sharing.prefix, scheduler.preempter.swapper
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


def _of_tenant(engine: "Engine", tenant: str) -> Snapshot:
    [row] = tenant_rows(engine, tenant) or [{}]
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
