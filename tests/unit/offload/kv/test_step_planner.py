"""The planner of an engine's steps: order of copies, and whether KV is recomputed."""

import pytest

from quire.offload.kv.step_planner import StepPlanner
from quire.offload.profiler import Sizes, Speeds
from quire.offload.schedule.work import BatchTokens
from quire.plan.rates import CopyRate

LAYERS = 8
SIZES = Sizes(kv_bytes=2, x_bytes=1)


def speeds(project_token_s, call_s=0.0):
    """One second to transfer a token's KV."""
    link = CopyRate(bytes_per_s=2.0, call_s=call_s)
    return Speeds(inward=link, outward=link, project_token_s=project_token_s, layer_s=1.0)


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_batches_that_share_a_layer_are_transferred_layer_by_layer(batches):
    tokens = [BatchTokens(rows=1, x=8 * (number % 2), kv=16 + number) for number in range(batches)]
    order = StepPlanner(SIZES, LAYERS).order(tokens)

    places = sorted(order, key=order.__getitem__)
    assert places == [(layer, batch) for layer in range(LAYERS) for batch in range(batches)]


def test_a_split_is_used_only_if_its_step_is_faster():
    planner, batch = StepPlanner(SIZES, LAYERS), BatchTokens(rows=1, kv=100)

    assert planner.choose(speeds(0.5), batch, (60, 0), 1) == 60
    assert planner.choose(speeds(5.0), batch, (50, 0), 1) == 0


def test_fixed_times_of_copies_count():
    """A few recomputed tokens do not pay for a further copy of each layer."""
    batch = BatchTokens(rows=1, kv=100)

    assert StepPlanner(SIZES, LAYERS).choose(speeds(0.5), batch, (4, 0), 1) == 4
    assert StepPlanner(SIZES, LAYERS).choose(speeds(0.5, call_s=9.0), batch, (4, 0), 1) == 0


def test_schedules_are_planned_once_for_equal_steps():
    planner, batch = StepPlanner(SIZES, LAYERS), BatchTokens(rows=2, x=8, kv=8)
    for _ in range(5):
        planner.order([batch, batch])
        planner.choose(speeds(0.5), BatchTokens(rows=2, kv=16), (8, 0), 2)

    assert planner.num_planned == 3  # one order, and two candidates
