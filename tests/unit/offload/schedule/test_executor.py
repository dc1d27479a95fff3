"""Executors: results are equal to those without offloading, for any durations."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.offload.schedule.executor import ScheduleClock
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens, Rules
from quire.offload.timeline import TaskKind
from support.offload_model import HostedModel, step_of

TOKENS = st.builds(
    BatchTokens,
    rows=st.integers(1, 3),
    x=st.integers(0, 9),
    kv=st.integers(0, 9),
    resident=st.integers(1, 4),
    host=st.integers(0, 5),
)
RULES = st.builds(
    Rules,
    slots=st.integers(1, 3),
    x_chunks=st.integers(1, 4),
    x_ring=st.integers(0, 3),
    prefetch=st.booleans(),
    serial=st.just(False),
    half_duplex=st.booleans(),
)


def assert_right(model: HostedModel) -> None:
    torch.testing.assert_close(model.hidden.cpu(), model.expected(), rtol=1e-5, atol=1e-5)


@given(TOKENS, RULES, st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_any_durations_compute_equal_results(tokens, rules, layers, embedded, draw):
    """On the virtual clock, which calls the work in the order of start times."""
    model = HostedModel(tokens, layers, rules.slots, ring=rules.x_ring)
    schedule = plan_step(step_of(tokens, layers, embedded=embedded), rules)

    timeline = ScheduleClock(lambda _: draw.random()).run(schedule, model.work())

    timeline.check()
    assert_right(model)


def test_slot_read_before_its_copy_is_detected():
    """Poisoned staging detects errors: without a dependency of attention it reads NaN."""
    tokens = BatchTokens(rows=1, kv=4, resident=1)
    model = HostedModel(tokens, 2)
    schedule = plan_step(step_of(tokens, 2))
    premature = type(schedule)(
        tuple(
            type(op)(**{**{f: getattr(op, f) for f in op.__slots__}, "needs": ()})
            if op.kind == TaskKind.ATTEND
            else op
            for op in schedule.operations
        )
    )

    ScheduleClock().run(premature, model.work())

    assert model.hidden.isnan().any()
