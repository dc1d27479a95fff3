"""The time of a step is the sum of roofline floors of its parts; rates follow the options."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.layout.model import LayerSpec
from quire.plan.roofline import RowTokens, step_parts
from quire.sim.engine import StepTimer, TimedCopies, folded_layout
from quire.sim.machine import MachineConfig
from quire.sim.models import CONFIGS, model_shape
from support.model_specs import CACHE_KINDS
from support.sim_traces import RATES

TINY = model_shape("quire-tiny")
WINDOWED = replace(TINY, layers=tuple(LayerSpec(window=w) for w in (None, 4, 4, 9) * 2))
rows_of_steps = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6)


def by_parts(model, rows, sampled_rows):
    """The plain reference: the floor of each part of the whole step."""
    tokens = [RowTokens(new=new, before=before) for new, before in rows]
    parts = step_parts(model, tokens, sampled_rows=sampled_rows)
    floors = [part.floor_s(RATES.read_bytes_per_s, RATES.flops_per_s) for part in parts]
    return RATES.overhead_s + sum(floors)


def timed(timer, rows, sampled_rows):
    new, before = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return timer.seconds(new, before, sampled_rows)


@pytest.mark.parametrize("model", [TINY, WINDOWED, *CACHE_KINDS.values()])
@given(rows=rows_of_steps, sampled=st.integers(0, 6))
def test_step_time_is_the_sum_of_the_floors_of_its_parts(model, rows, sampled):
    timer = StepTimer(model, RATES)
    assert timed(timer, rows, sampled) == pytest.approx(by_parts(model, rows, sampled), rel=1e-12)
    assert timed(timer, rows, sampled) == timed(timer, rows, sampled)  # cached


def test_copy_time_is_bytes_divided_by_rate():
    [group] = folded_layout(TINY, codec="bfloat16", page_tokens=16).groups
    copies, pages = TimedCopies(1e6), np.arange(3, dtype=np.int32)

    copies.save(group.page_class, pages, 0)
    copies.load(group.page_class, pages, 0)

    assert copies() == copies.unpaid_s() == pytest.approx(6 * group.page_class.page_bytes / 1e6)
    assert copies.unpaid_s() == 0.0


@pytest.mark.parametrize("name", [*CONFIGS, "quire-tiny"])
def test_every_named_model_shape_can_be_timed(name):
    assert timed(StepTimer(model_shape(name), RATES), [(1, 10)], 1) > RATES.overhead_s


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("llama-3-8b", 8.03), ("llama-3.1-70b", 70.6), ("llama-3.2-1b", 1.24)),
        *(("qwen2.5-7b", 7.62), ("opt-6.7b", 6.66)),
    ],
)
def test_named_model_shapes_have_the_published_number_of_parameters(name, billions):
    assert model_shape(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_machines_are_scaled_by_efficiency_or_refused():
    peak = MachineConfig(efficiency=1.0).rates()
    assert MachineConfig().rates().read_bytes_per_s == pytest.approx(0.6 * peak.read_bytes_per_s)
    assert MachineConfig(name="profile").rates(RATES).flops_per_s == RATES.flops_per_s
    assert MachineConfig(step_overhead_ms=5).rates().overhead_s == 0.005

    for options in ({"name": "a10"}, {"efficiency": 0.0}, {"efficiency": 1.5}):
        with pytest.raises(ConfigError):
            MachineConfig(**options)
    with pytest.raises(ConfigError):
        MachineConfig(step_overhead_ms=-1.0)
    with pytest.raises(ConfigError, match="flops_per_s"):
        replace(RATES, flops_per_s=0.0)
    with pytest.raises(UnknownName, match="llama-3-8b"):
        model_shape("llama3-8b")
