"""Load of a server by many streaming clients."""

from dataclasses import replace

import pytest

from benchmarks.server_load.part import QUICK_LOAD, percentile, plans, run_load


def test_a_tenth_of_the_clients_disconnects_and_rounds_differ():
    first, second = plans(QUICK_LOAD, 0), plans(QUICK_LOAD, 1)

    assert sum(plan.leaves_after is not None for plan in first) == 4
    assert first == plans(QUICK_LOAD, 0) != second


def test_percentile_is_a_measured_value():
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
    assert percentile([], 0.99) == 0.0


@pytest.mark.slow
def test_no_client_of_a_server_is_lost():
    claims = run_load(replace(QUICK_LOAD, clients=20)).claims

    assert claims["server_load_clients"] == 60
    assert claims["server_load_lost"] == 0
    assert claims["server_load_kv_bytes_left"] == 0
