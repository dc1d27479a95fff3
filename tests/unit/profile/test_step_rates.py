"""Timed steps equal the predicted steps, and fitted rates equal those of exact times."""

import pytest
import torch

from benchmarks.common.models import SHAPES, random_model
from quire.errors import ConfigError, InvariantError
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, EvictionSpec
from quire.plan.batch_verdict import decode_step_seconds, prefill_step_seconds, row_steps
from quire.plan.rates import DecodeRates, PrefillRates, StepRates
from quire.profile import step_rates
from quire.profile.ceilings import QUICK_PROFILE, THOROUGH_PROFILE

RULES = ("full", "recent:cap=2,every=1,when=decode", "average:cap=12,every=4")


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPES["tiny"](), dtype=torch.bfloat16)


@pytest.mark.parametrize("evict", RULES)
def test_engine_runs_the_predicted_steps(model, evict):
    """`timed_steps` compares the tokens of each step; this test also compares the slots."""
    shape = step_rates.RunShape(rows=3, prompt_tokens=30, new_tokens=9, evict=evict)
    engine = step_rates.static_engine(model, shape)
    memory = engine.pool.kv.memory
    lane = next(table for table in memory.tables.values() if not table.group.private)

    for time in step_rates.timed_steps(model, shape, engine):
        slots = {int(lane.num_slots[row].max()) for row in memory.live_rows}
        assert slots <= {time.step.before + time.step.new}  # no slots after the rows have ended
        assert time.seconds > 0
    assert not engine.has_work


def test_rows_that_do_not_run_concurrently_are_detected(model):
    """A row of 103 tokens needs 28 KiB: 64 KiB hold two rows, not three."""
    shape = step_rates.RunShape(rows=3, prompt_tokens=100, new_tokens=4, evict="full")
    with pytest.raises(InvariantError, match="3 rows"):
        list(step_rates.timed_steps(model, shape, step_rates.static_engine(model, shape, 64 << 10)))


def exact_times(rates, rows):
    specs = [
        EvictionSpec(cap=cap, every=every, when=when)
        for cap, every in ((20, 4), (40, 8))
        for when in (PREFILL_AND_DECODE, DECODE)
    ]
    for spec in specs:
        for prompt in (50, 90):
            for step in row_steps(spec, prompt, 12):
                of = decode_step_seconds if step.decodes else prefill_step_seconds
                yield step_rates.StepTime(rows=rows, step=step, seconds=of(rates, step, rows))


def test_fit_recovers_the_rates_of_exact_times():
    rates = StepRates(
        whole=PrefillRates(call_s=1e-2, token_s=1e-5, square_s=1e-6),
        blocks=PrefillRates(call_s=2e-2, token_s=5e-4, square_s=2e-6),
        decode=DecodeRates(
            batch_s=((1, 5e-3), (4, 8e-3), (16, 7e-3)),
            slot_s=1e-6,
            evict_row_s=1e-3,
            evict_slot_s=1e-5,
        ),
    )
    found = step_rates.fit_steps([time for rows in (1, 4, 16) for time in exact_times(rates, rows)])

    for part in ("whole", "blocks", "decode"):
        expected, fitted = getattr(rates, part), getattr(found, part)
        for name in set(expected.__dataclass_fields__) - {"batch_s"}:
            assert getattr(fitted, name) == pytest.approx(getattr(expected, name), rel=1e-3), name
    assert [rows for rows, _ in found.decode.batch_s] == [1, 4, 16]
    assert [s for _, s in found.decode.batch_s] == pytest.approx([5e-3, 8e-3, 7e-3], rel=1e-3)


def test_block_rates_without_eviction_equal_prefill_rates_of_usual_shapes(model):
    shapes = step_rates.usual_shapes("full", context_tokens=1_024, config=QUICK_PROFILE)
    rates = step_rates.measure_step_rates(model, shapes, repeats=1)
    assert rates.blocks == rates.whole
    assert rates.decode.evict_row_s == rates.decode.evict_slot_s == 0

    shapes = step_rates.usual_shapes(
        "h2o:recent=100,cap=5", context_tokens=512, config=THOROUGH_PROFILE
    )

    assert all(shape.prompt_tokens + shape.new_tokens <= 512 for shape in shapes)
    assert {shape.evict.partition(":")[0] for shape in shapes} == {"h2o"}
    caps = {int(shape.evict.split("cap=")[1].split(",")[0]) for shape in shapes}
    assert min(caps) > 100
    with pytest.raises(ConfigError):
        step_rates.usual_shapes("h3o", context_tokens=512, config=QUICK_PROFILE)
