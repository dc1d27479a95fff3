"""Measured speeds and the splits computed from them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.offload.control import SplitController
from quire.offload.profiler import OffloadProfiler, Sizes, Speeds
from quire.offload.schedule.executor import ScheduleClock, no_work
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens, StepWork, even_layers
from quire.offload.split import pipelined_seconds, pipelined_split
from quire.offload.timeline import LANES, TaskKind
from quire.plan.fitting import ChangeDetector
from quire.plan.rates import CopyRate
from support.offload_timelines import fit_speeds, measure_speeds

LAYERS, TOKENS = 8, 1000
SIZES = Sizes(kv_bytes=1e6, x_bytes=5e5, new_kv_bytes=1e6)
MACHINE = Speeds(  # a link of 1 GB/s: k = 1 ms, x = 0.5 ms, r = 0.58 ms
    inward=CopyRate(bytes_per_s=1e9, call_s=1e-5),
    outward=CopyRate(bytes_per_s=8e8, call_s=1e-5),
    project_token_s=0.58e-3,
    project_call_s=1e-4,
    attend_token_s=1e-5,
    attend_call_s=1e-4,
    layer_s=2e-3,
    row_s=1e-4,
)


def step(x: int, speeds: Speeds, tokens: int = TOKENS, host: int = 0):
    batch = BatchTokens(rows=4, x=x, kv=tokens - x - host, host=host)
    layers = even_layers((batch,), LAYERS, embedded=False)
    return plan_step(StepWork(layers=layers, sizes=SIZES, speeds=speeds))


def machine(speeds: Speeds, noise: float = 0.0, seed: int = 0) -> ScheduleClock:
    """A simulated machine with these speeds, independent of the schedule's estimates."""
    draw = random.Random(seed)

    def seconds(op):
        rate = speeds.inward if LANES[op.kind] == "in" else speeds.outward
        exact = {
            TaskKind.PROJECT: speeds.project_call_s + op.tokens * speeds.project_token_s,
            TaskKind.ATTEND: speeds.attend_call_s + op.tokens * speeds.attend_token_s,
            TaskKind.LAYER: speeds.layer_s + op.tokens * speeds.row_s,
        }.get(op.kind) or rate.seconds(op.num_bytes)
        return exact * draw.lognormvariate(0, noise)

    return ScheduleClock(seconds)


def of(speeds: Speeds, rows: int = 4):
    return speeds.rates(SIZES, rows=rows, tokens=TOKENS)


def test_probes_of_two_sizes_measure_the_speeds():
    probes = [(step(n // 2, MACHINE, n), no_work) for n in (40, 400)]

    found = measure_speeds(machine(MACHINE), probes)

    assert found.inward.bytes_per_s == pytest.approx(1e9, rel=1e-6)
    assert found.inward.call_s == pytest.approx(1e-5, rel=1e-3)
    assert found.outward.seconds(4e6) == pytest.approx(MACHINE.outward.seconds(4e6))
    assert found.project_token_s == pytest.approx(0.58e-3)
    assert found.attend_token_s == pytest.approx(1e-5)
    assert found.layer_s + 4 * found.row_s == pytest.approx(2.4e-3)
    assert fit_speeds([]).project_token_s == 0


@given(st.integers(0, 5))
def test_wrong_initial_speeds_are_corrected_within_a_few_steps(seed):
    wrong = replace(MACHINE, inward=CopyRate(bytes_per_s=3e9), project_token_s=2e-3, layer_s=1e-4)
    profiler, clock = OffloadProfiler(wrong), machine(MACHINE, 0.05, seed)

    for _ in range(4):
        split = pipelined_split(of(profiler.speeds), TOKENS)
        profiler.observe(clock.run(step(split, profiler.speeds)))

    assert pipelined_split(of(profiler.speeds), TOKENS) == pytest.approx(
        pipelined_split(of(MACHINE), TOKENS), rel=0.05
    )


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_split_follows_a_link_speed_change_within_ten_steps(factor, noise):
    changed = replace(MACHINE, inward=CopyRate(bytes_per_s=1e9 * factor, call_s=1e-5))
    profiler, control = OffloadProfiler(MACHINE), SplitController()
    clocks = [machine(MACHINE, noise, 1)] * 12 + [machine(changed, noise, 2)] * 10

    for clock in clocks:
        split = control.split(of(profiler.speeds), TOKENS)
        timeline = clock.run(step(split, profiler.speeds))
        profiler.observe(timeline)
        control.observe(timeline, of(profiler.speeds), TOKENS)

    split = control.split(of(profiler.speeds), TOKENS)
    best_s = pipelined_seconds(of(changed), TOKENS, pipelined_split(of(changed), TOKENS))
    assert pipelined_seconds(of(changed), TOKENS, split) <= best_s * (1.05 + noise / 2)
    assert profiler.num_changes >= 1


def test_noise_is_not_detected_as_a_change():
    profiler, clock = OffloadProfiler(MACHINE), machine(MACHINE, 0.1, 3)

    for _ in range(40):
        profiler.observe(clock.run(step(500, MACHINE)))

    assert profiler.num_changes <= 2


def test_change_detector_needs_several_samples():
    detector = ChangeDetector()

    assert not any(detector.add(1.0, 1.0) for _ in range(99))
    assert not detector.add(1.0, 50.0)
    assert not detector.add(1.0, 0.0)
    assert any(detector.add(1.0, 1.5) for _ in range(9))


@pytest.mark.parametrize("off", [0.5, 0.7, 1.5, 2.0])
def test_measured_waits_correct_a_wrong_cost_model(off):
    """The model's recompute speed stays wrong; only measured waits show the error."""
    assumed = replace(MACHINE, project_token_s=MACHINE.project_token_s * off)
    control, clock = SplitController(), machine(MACHINE)

    for _ in range(40):
        split = control.split(of(assumed), TOKENS)
        control.observe(clock.run(step(split, assumed)), of(assumed), TOKENS)

    best_s = pipelined_seconds(of(MACHINE), TOKENS, pipelined_split(of(MACHINE), TOKENS))
    assert pipelined_seconds(of(MACHINE), TOKENS, split) <= best_s * 1.06
    assert control.correction > 0 if off > 1 else control.correction < 0


def test_split_ignores_small_gains_and_grows_with_the_length():
    control = SplitController(unit=16)
    rates = of(MACHINE)
    first = control.split(rates, 1000)
    nearly = replace(rates, recompute_s=rates.recompute_s * 1.01)

    assert control.split(nearly, 1000) == first
    assert control.num_moves == 0
    assert first % 16 == 0
    assert control.split(nearly, 2000) == pytest.approx(2 * first, abs=16)
    assert control.num_moves == 0
    slow = replace(rates, recompute_s=rates.recompute_s * 3)
    assert control.split(slow, 1000) == pytest.approx(first - 250, abs=16)  # a quarter per step
    for _ in range(4):
        control.split(slow, 1000)
    assert control.split(slow, 1000) == pytest.approx(pipelined_split(slow, 1000), abs=40)
    assert control.split(replace(rates, x_s=rates.kv_s), 1000) == 0


def test_invalid_unit_of_the_controller_is_rejected():
    with pytest.raises(ConfigError, match="unit >= 1"):
        SplitController(unit=0)
