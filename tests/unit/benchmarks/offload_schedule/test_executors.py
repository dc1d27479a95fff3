"""Executors: results are equal to those without offloading, for any durations."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.offload_schedule.threads import Pace, ThreadExecutor, ThrottledLink, expected
from benchmarks.offload_schedule.timelines import overlap
from quire.errors import ConfigError, LinkStalled
from quire.offload.schedule.executor import Executor, VirtualClock
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens, Rules
from quire.offload.timeline import IN, Kind
from quire.plan.rates import CopyRate
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

    timeline = VirtualClock(lambda _: draw.random()).run(schedule, model.work())

    timeline.check()
    assert_right(model)


@settings(max_examples=12)
@given(TOKENS, RULES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_threads_with_random_delays_compute_equal_results(tokens, rules, layers, draw):
    model = HostedModel(tokens, layers, rules.slots, ring=rules.x_ring)
    schedule = plan_step(step_of(tokens, layers, host_token_s=1e-6), rules)
    delays = {op.index: draw.random() * 2e-3 for op in schedule.operations}
    lanes = {schedule.resource(lane) for lane in schedule.lanes}
    paces = {lane: Pace(expected, lambda op: delays[op.index]) for lane in lanes}

    timeline = ThreadExecutor(paces).run(schedule, model.work())

    timeline.check()
    assert len(timeline.spans) == len(schedule.operations)
    assert_right(model)


def test_slot_read_before_its_copy_is_detected():
    """Poisoned staging detects errors: without a dependency of attention it reads NaN."""
    tokens = BatchTokens(rows=1, kv=4, resident=1)
    model = HostedModel(tokens, 2)
    schedule = plan_step(step_of(tokens, 2))
    premature = type(schedule)(
        tuple(
            type(op)(**{**{f: getattr(op, f) for f in op.__slots__}, "needs": ()})
            if op.kind == Kind.ATTEND
            else op
            for op in schedule.operations
        )
    )

    VirtualClock().run(premature, model.work())

    assert model.hidden.isnan().any()


def test_executors_implement_the_protocol():
    assert isinstance(VirtualClock(), Executor)
    assert isinstance(ThreadExecutor(), Executor)


def test_stalled_link_is_named_in_the_error():
    schedule = plan_step(step_of(BatchTokens(rows=1, kv=4), 3))
    stuck = Pace(expected, lambda op: 60.0 * (op.layer == 1))

    with pytest.raises(LinkStalled, match=r"running: KV in 1\.0"):
        ThreadExecutor({IN: stuck}, stall_s=0.05).run(schedule)


def test_failing_work_fails_the_step_and_releases_all_lanes():
    schedule = plan_step(step_of(BatchTokens(rows=1, x=3, kv=4), 3))

    def fail(op):
        if op.kind == Kind.PROJECT and op.layer == 1:
            raise ConfigError("no such product")

    with pytest.raises(ConfigError, match="no such product"):
        ThreadExecutor().run(schedule, fail)
    left = [thread for thread in threading.enumerate() if thread.name in schedule.lanes]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


def test_throttled_link_has_its_rate_and_can_change():
    schedule = plan_step(step_of(BatchTokens(rows=1, kv=1000), 1))
    (copy,) = schedule.lanes[IN]
    link = ThrottledLink(CopyRate(bytes_per_s=1e6, call_s=1e-3))

    assert link.seconds(copy) == pytest.approx(0.129)
    link.rate = CopyRate(bytes_per_s=2e6)
    assert link.seconds(copy) == pytest.approx(0.064)
    uneven = ThrottledLink(link.rate, jitter=0.5, seed=1)
    assert len({uneven.seconds(copy) for _ in range(5)}) == 5
    with pytest.raises(ConfigError, match="jitter"):
        ThrottledLink(link.rate, jitter=-1)


def test_deadlines_are_absolute(monkeypatch):
    """A thread that wakes late does not delay later operations; late work does."""
    clock = iter([0.0, 0.0, 0.0, 0.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    schedule = plan_step(step_of(BatchTokens(rows=1, kv=4), 5))
    pace = Pace(lambda _: 1.0)
    stopped = threading.Event()
    stopped.set()  # no thread waits

    ready = (5.0, 5.5, 8.2, 8.5, 9.0)
    due = [pace.wait(op, at, stopped) for op, at in zip(schedule.lanes[IN], ready, strict=True)]

    assert due == [(5.0, 6.0), (6.0, 7.0), (8.2, 9.2), (9.2, 10.2), (10.2, 20.0)]


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(x_chunks=1, slots=3), Rules(half_duplex=True), Rules(x_chunks=8, x_ring=3)],
)
@pytest.mark.parametrize("host", [0, 300])
def test_cuda_streams_compute_equal_results(rules, host, cuda):
    from benchmarks.offload_schedule.cuda import CudaExecutor

    tokens = BatchTokens(rows=4, x=2000, kv=1500, resident=50, host=host)
    model = HostedModel(tokens, 9, rules.slots, device="cuda", width=64, ring=rules.x_ring)
    schedule = plan_step(step_of(tokens, 9, embedded=False), rules)

    timeline = CudaExecutor(cuda).run(schedule, model.work())

    assert len(timeline.spans) == len(schedule.operations)
    torch.testing.assert_close(model.hidden.cpu(), model.expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_copy_on_a_stream_overlaps_a_product(cuda):
    from benchmarks.offload_schedule.cuda import CudaExecutor

    tokens = BatchTokens(rows=4, x=60_000, kv=60_000, resident=1)
    model = HostedModel(tokens, 6, device="cuda", width=512)
    schedule = plan_step(step_of(tokens, 6))
    executor = CudaExecutor(cuda)
    executor.run(schedule, model.work())

    timeline = executor.run(schedule, model.work())

    assert timeline.seconds > 0
    assert overlap(timeline) > 0
