"""The autoscaling policy against its two formulas."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scale.autoscaling import KV_USED, LoadScaling


@dataclass
class Context:
    total_num_requests: float = 0
    aggregated_metrics: dict | None = field(default_factory=dict)


@pytest.mark.parametrize(
    ("requests", "used", "replicas"),
    [
        (0, [], 0),
        (64, [], 1),
        (65, [], 2),
        (10, [0.8], 1),
        (10, [0.9], 2),
        (10, [0.9, 0.9], 3),
        (640, [0.1] * 4, 10),
    ],
)
def test_the_larger_of_requests_and_memory_counts(requests, used, replicas):
    metrics = {KV_USED: dict(enumerate(used))}

    assert LoadScaling(0.8, 64)(Context(requests, metrics)) == (replicas, {})


def test_before_the_first_report_requests_count():
    assert LoadScaling(0.8, 4)(Context(9, None)) == (3, {})


@given(st.floats(0, 1e4), st.lists(st.floats(0, 1), max_size=50), st.floats(0.1, 1))
def test_with_that_many_replicas_both_targets_hold(requests, used, target_kv):
    replicas, _ = LoadScaling(target_kv, 16)(Context(requests, {KV_USED: dict(enumerate(used))}))

    assert requests <= 16 * replicas * (1 + 1e-9)
    assert math.fsum(used) <= target_kv * replicas * (1 + 1e-9)
