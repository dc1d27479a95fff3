"""Load of a server by many streaming clients."""

from dataclasses import replace

import pytest

from benchmarks.common.streams import Response
from benchmarks.server_load import QUICK_LOAD, ClientPlan, judged, percentile, plans, run_load


def test_a_tenth_of_the_clients_disconnects_and_rounds_differ():
    first, second = plans(QUICK_LOAD, 0), plans(QUICK_LOAD, 1)

    assert sum(plan.leaves_after is not None for plan in first) == 4
    assert first == plans(QUICK_LOAD, 0) != second


def test_percentile_is_a_measured_value():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
    assert percentile([], 0.99) == 0.0


TEXT = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[]}\n\n'
END = b'data: {"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("segments", "has_left", "outcome"),
    [
        ((TEXT, END), False, "finished"),
        ((TEXT,), True, "disconnected"),
        ((b"HTTP/1.1 503 Busy\r\n\r\n",), False, "refused"),
        ((TEXT, END.replace(b"3", b"2")), False, "lost"),
        ((TEXT, END[:-10]), False, "lost"),
        ((TEXT, b'data: {"error":"stopped"}\n\n'), False, "lost"),
        ((), False, "lost"),
    ],
)
def test_a_client_is_finished_disconnected_refused_or_lost(segments, has_left, outcome):
    timed = tuple((1.0 + i, segment) for i, segment in enumerate(segments))
    plan = ClientPlan(body={"max_tokens": 3}, starts_s=0.0, leaves_after=None)

    found = judged(Response(sent_s=0.5, segments=timed, has_left=has_left), plan)

    assert found.outcome == outcome
    assert found.e2e_s == (1.5 if outcome == "finished" else 0.0)


@pytest.mark.slow
def test_no_client_of_a_server_is_lost():
    claims = run_load(replace(QUICK_LOAD, clients=20)).claims

    assert claims["server_load_clients"] == 60
    assert claims["server_load_lost"] == 0
    assert claims["server_load_kv_bytes_left"] == 0
