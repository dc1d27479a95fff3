"""Schedules of prefix loads, and the fastest of several variants."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.offload.profiler import Sizes, Speeds
from quire.offload.schedule.executor import ScheduleClock
from quire.offload.schedule.planner import fastest
from quire.offload.schedule.work import BatchTokens, Rules, StepWork, even_layers
from quire.offload.split import Loading, restore_seconds, restore_split
from quire.plan.rates import CopyRate, PrefillRates
from support.offload_timelines import copied_bytes
from support.restore_schedule import plan_restore


@given(
    st.builds(
        PrefillRates,
        token_s=st.floats(1e-3, 10),
        square_s=st.floats(0, 0.1),
        call_s=st.floats(0, 9),
    ),
    st.builds(Loading, token_s=st.floats(1e-3, 10), call_s=st.floats(0, 9)),
    st.integers(0, 300),
    st.integers(1, 70),
)
def test_prefix_load_time_matches_the_quadratic(prefill, loading, tokens, chunk):
    split = restore_split(prefill, loading, tokens)

    schedule = plan_restore(
        prefill, loading, tokens=tokens, read_tokens=split, token_bytes=3, chunk_tokens=chunk
    )

    schedule.check()
    timeline = ScheduleClock().run(schedule)
    assert timeline.seconds == pytest.approx(restore_seconds(prefill, loading, tokens, split))
    covered = sorted((op.first, op.first + op.tokens) for op in schedule.operations)
    assert [a for a, _ in covered] == [0, *[b for _, b in covered[:-1]]][: len(covered)]
    assert sum(op.tokens for op in schedule.operations) == tokens
    assert copied_bytes(schedule, *{op.kind for op in schedule.operations}) == 3 * (tokens - split)


@given(
    st.floats(0.01, 0.99),
    st.floats(0.05, 4),
    st.floats(0, 3),
    st.integers(0, 400),
    st.integers(1, 5),
)
def test_fastest_variant_is_never_slower_than_transferring_all(xi, rho, call_s, tokens, layers):
    """Exact: with few layers and long fixed times a split can lose; then nothing is recomputed."""
    rate = CopyRate(bytes_per_s=1.0, call_s=call_s)
    speeds = Speeds(inward=rate, outward=rate, project_token_s=rho, project_call_s=call_s)

    def variant(x):
        batch = BatchTokens(rows=1, x=x, kv=tokens - x)
        layout = even_layers((batch,), layers, embedded=False)
        return StepWork(layers=layout, sizes=Sizes(kv_bytes=1, x_bytes=xi), speeds=speeds), Rules()

    variants = [variant(x) for x in (0, tokens // 3, tokens)]
    found, schedule = fastest(variants)

    times = [ScheduleClock().run(fastest([w])[1]).seconds for w in variants]
    assert ScheduleClock().run(schedule).seconds == min(times) <= times[0]
    assert found == times.index(min(times))
