"""Percentiles compared with NumPy, fairness with its formula, gauges with direct sums."""

import itertools
import math

import numpy as np
import pytest

from quire.config.sampling_params import SamplingParams
from quire.scheduler.events import KVEvent
from quire.sim.engine import EventTally, ServedTokens, jain_index
from quire.sim.metrics import latencies, percentiles
from quire.sim.records import Gauges, RequestRecord, SimulatedReading
from support.requests import make_request


def record(arrival, admitted, first, finish, answer=5):
    times = {"arrival_s": float(arrival), "admitted_s": admitted, "first_token_s": first}
    sizes = {"line": 1, "prompt_tokens": 10, "answer_tokens": answer}
    return RequestRecord(tenant="default", finish_s=finish, **sizes, **times)


RUNS = [record(i, i + 0.1 * i, i + 0.3 * i, i + 2.0 * i, answer=1 + i % 4) for i in range(1, 40)]


def reading(time_s=0.0, used=0, allocated=0, wasted=0, running=0, waiting=0):
    held = {"used_bytes": used, "allocated_bytes": allocated, "wasted_bytes": wasted}
    return SimulatedReading(time_s=time_s, running=running, waiting=waiting, **held)


@pytest.mark.parametrize("q", [50, 90, 95, 99])
def test_percentiles_equal_numpy(q):
    summary = latencies(RUNS)
    values = {
        "queue": [r.admitted_s - r.arrival_s for r in RUNS],
        "ttft": [r.first_token_s - r.arrival_s for r in RUNS],
        "e2e": [r.finish_s - r.arrival_s for r in RUNS],
        "tpot": [
            (r.finish_s - r.first_token_s) / (r.answer_tokens - 1)
            for r in RUNS
            if r.answer_tokens > 1
        ],
    }
    for name, of_runs in values.items():
        assert summary[f"{name}_p{q}_s"] == np.percentile(of_runs, q)
    assert percentiles("ttft", []) == percentiles("ttft", [math.nan]) == {}


@pytest.mark.parametrize(
    ("served", "index"),
    [
        *(({"a": 5.0, "b": 5.0}, 1.0), ({"a": 5.0, "b": 0.0}, 0.5), ({"a": 2.0, "b": 1.0}, 0.9)),
        ({"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}, 0.75),
        ({"a": 0.0, "b": 0.0}, None),
    ],
)
def test_jains_index(served, index):
    assert jain_index(served) == index


def requested(tenant):
    return make_request("r", [1], SamplingParams(), tenant=tenant)


def test_served_tokens_count_while_all_tenants_are_backlogged():
    served = ServedTokens(("a", "b"))
    served.arrived("a")
    assert not served.all_backlogged
    served.arrived("b")
    assert served.all_backlogged

    served.served([requested(tenant) for tenant in "aba"], [5, 2, 1])
    served.admitted("b")

    assert served.tokens == {"a": 6, "b": 2}
    assert not served.all_backlogged


def test_briefly_backlogged_tenant_is_not_compared():
    """It waits repeatedly while one request of the other tenant is served."""
    served = ServedTokens(("flood", "small"))
    flood = requested("flood")
    for _ in range(100):
        for tenant in ("flood", "flood", "small"):
            served.arrived(tenant)
        served.served([flood], [50])
        served.admitted("flood")
        served.admitted("small")
        served.served([flood], [1])

    assert served.tokens == {"flood": 5_100, "small": 0}
    assert jain_index(served.by_weight) is None


def test_long_backlog_of_all_tenants_is_compared_by_weight():
    served = ServedTokens(("a", "b"))
    both = [requested(tenant) for tenant in "ab"]
    for tenant in "ab" * 11:
        served.arrived(tenant)
    for _ in range(11):
        served.admitted("a")
        served.admitted("b")
        served.served(both, [3, 1])

    assert served.settled == served.tokens == {"a": 33, "b": 11}
    served = ServedTokens(("a", "b"), {"a": 3.0})
    served.settled.update(a=30, b=10)

    assert jain_index(served.by_weight) == 1.0
    assert jain_index(ServedTokens(("a", "b")).by_weight) is None


def test_event_tally_sums_events():
    def event(kind, **data):
        return KVEvent(kind, 0.0, "r", "default", data)

    tally = EventTally()
    for occurred in (
        event("swapped_out", kv_bytes=100, seconds=0.1),
        event("swapped_in", kv_bytes=60, seconds=0.1),
        event("preempted", how="recompute", reason="", lost_tokens=7, freed_bytes=1),
        event("copied", pages=2, kv_bytes=32),
        event("chunk", tokens=5, kv_bytes=1),
    ):
        tally(occurred)

    assert (tally.num_swaps_out, tally.num_swaps_in, tally.swapped_bytes) == (1, 1, 160)
    assert (tally.lost_tokens, tally.copied_bytes) == (7, 32)


def test_gauges_are_weighted_by_time():
    gauges = Gauges()
    assert gauges.waste_fraction == gauges.mean("running") == 0.0
    gauges.add(reading(used=100, allocated=80, wasted=20, running=2, waiting=4), 3.0)
    gauges.add(reading(used=40, allocated=40, wasted=30, running=1), 1.0)

    assert gauges.mean("used_byte") == (300 + 40) / 4
    assert gauges.mean("running") == 7 / 4
    assert gauges.waste_fraction == (60 + 30) / (240 + 40)
    assert (gauges.peak_used_bytes, gauges.peak_running, gauges.peak_waiting) == (100, 2, 4)

    # a long series is thinned evenly
    gauges = Gauges()
    for i in range(20_000):
        gauges.add(reading(time_s=float(i)), 1.0)
    times = [sample.time_s for sample in gauges.samples]

    assert 2000 < len(times) <= 4096
    assert len({b - a for a, b in itertools.pairwise(times)}) == 1
