"""Measured ceilings, copies and prefill chunks by hand; timed steps and fitted rates."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.common.models import SHAPES, random_model
from benchmarks.memory import measured
from quire.errors import ConfigError, InvariantError
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, EvictionSpec
from quire.plan.batch_verdict import decode_step_seconds, prefill_step_seconds, row_steps
from quire.plan.ceilings import Machine
from quire.plan.rates import DecodeRates, PrefillRates, StepRates
from quire.profile import ceilings, step_rates
from quire.profile.ceilings import QUICK_PROFILE, THOROUGH_PROFILE

MACHINE = Machine(cpu="a processor", threads=1, torch="2.13.0")


def test_rates_are_medians_without_the_first_call_of_a_written_buffer(monkeypatch):
    """1,024 B read in 0.5 s; 512 B copied; 2 * 3 * 5 * 7 = 210 FLOPs: each twice in a second."""

    def elapsed(call: Callable[[], object]) -> float:
        call()
        return 0.5

    monkeypatch.setattr(ceilings, "seconds", elapsed)
    probe = ceilings.MemoryProbe(1024)

    assert probe.read_rate() == 2048
    assert probe.copy_rate() == 1024
    assert ceilings.ProductProbe("float32", 3, 5, 7).rate() == 420

    # Times 100 (not counted), 1, 2, 9: the median is 2 s for 16 B.
    times = iter([100.0, 1.0, 2.0, 9.0])
    monkeypatch.setattr(ceilings, "seconds", lambda _call: next(times))
    config = replace(ceilings.QUICK_PROFILE, repeats=3)
    assert ceilings.median_rate(ceilings.MemoryProbe(16).read_rate, config) == 8.0
    assert ceilings.touched_buffer(4096).tolist() == [1] * 4096


def test_every_configured_rate_is_measured():
    messages: list[str] = []
    found = ceilings.measure_ceilings(ceilings.QUICK_PROFILE, MACHINE, progress=messages.append)

    shapes = {(p.dtype, p.rows, p.inner, p.columns) for p in found.products}
    assert shapes == {(d, r, 256, 256) for d in ("bfloat16", "float32") for r in (1, 32)}
    assert found.machine == MACHINE
    for rate in (found.read_bytes_per_s, found.copy_bytes_per_s):
        assert rate > 0
    assert found.copies["cpu"].out.bytes_per_s > 0
    swaps = 2 * len(ceilings.QUICK_PROFILE.swap_bytes) * len(found.copies)
    assert len(messages) == 1 + len(found.products) + swaps


CPU = torch.device("cpu")
QUICK_SWAP = measured.SwapConfig(lengths=(32, 96), repeats=2, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPES["tiny"](), dtype=torch.float32)


@pytest.mark.parametrize("scattered", [True, False])
def test_scattered_pages_are_not_adjacent(scattered):
    probe = ceilings.SwapProbe(CPU, ceilings.MIB, scattered=scattered)
    for _ in range(3):
        pages = probe.memory.tables["kv"].row_pages(probe.row).astype(int)
        neighbours = np.count_nonzero(np.abs(np.diff(pages)) == 1)
        assert neighbours == 0 if scattered else neighbours > 0.8 * len(pages)  # but for slabs

        probe.swap()

        assert probe.num_bytes == probe.memory.row_bytes(probe.row) == ceilings.MIB
        assert (probe.pool.used_bytes, probe.pool.peak_bytes) == (0, ceilings.MIB)
        probe.memory.check()


def test_every_size_is_measured_both_ways_and_fitted_to_scattered_pages():
    times = list(ceilings.measure_copies(CPU, (ceilings.MIB // 4, ceilings.MIB), repeats=1))

    expected = [
        (size, scattered)
        for size in (ceilings.MIB // 4, ceilings.MIB)
        for scattered in (True, False)
    ]
    assert [(t.num_bytes, t.scattered) for t in times] == expected
    assert all(t.out_s > 0 and t.back_s > 0 for t in times)

    # out: 1 ms and 1 ns per byte; 0.1 ms of a call is per page; packed times are not used
    times = [
        ceilings.CopyTimes(num_bytes=n, scattered=True, out_s=1e-3 + n * 1e-9, back_s=n * 2e-9)
        for n in (10**5, 10**6, 10**7)
    ]
    times.append(ceilings.CopyTimes(num_bytes=10**6, scattered=False, out_s=9.0, back_s=9.0))

    rates = ceilings.copy_rates(times, 1e-4, 0)

    assert rates.out.bytes_per_s == pytest.approx(1e9)
    assert rates.out.call_s == pytest.approx(0.9e-3)
    assert rates.out.piece_s == 1e-4
    assert rates.back.bytes_per_s == pytest.approx(0.5e9)
    assert rates.back.call_s == pytest.approx(0, abs=1e-9)


def test_every_chunk_is_measured_and_prompts_above_the_context_raise(model):
    times = list(ceilings.measure_chunks(model, chunks=(16, 40), prompt_tokens=100, repeats=2))

    once = [(16, before) for before in range(0, 96, 16)] + [(4, 96)]
    other = [(40, 0), (40, 40), (20, 80)]
    assert [(t.tokens, t.before) for t in times] == once * 2 + other * 2
    assert all(t.seconds > 0 for t in times)
    with pytest.raises(ConfigError, match="1 to 1023 tokens, got 1024"):
        list(ceilings.measure_chunks(model, chunks=(16,), prompt_tokens=1024, repeats=1))
    with pytest.raises(ConfigError, match=r"expected prompts of at most 1022 tokens .* got 1023"):
        list(measured.measure_swap(model, replace(QUICK_SWAP, lengths=(8, 1023))))


def test_prefill_rates_match_hand_computation_and_are_stored_by_shape(model):
    """2 ms per step, 10 us per token, 3 ns per square."""
    shapes = ((16, 0), (64, 0), (64, 500), (16, 2000), (64, 3000))
    squares = [(before + tokens) ** 2 - before**2 for tokens, before in shapes]
    times = [
        ceilings.ChunkTime(tokens=n, before=before, seconds=2e-3 + 1e-5 * n + 3e-9 * square)
        for (n, before), square in zip(shapes, squares, strict=True)
    ]

    rates = ceilings.prefill_rates(times)

    assert rates.call_s == pytest.approx(2e-3)
    assert rates.token_s == pytest.approx(1e-5)
    assert rates.square_s == pytest.approx(3e-9)

    said: list[str] = []

    found = ceilings.measure_prefill_rates(
        model, chunks=(16,), prompt_tokens=50, repeats=1, progress=said.append
    )

    [key] = found
    assert key.startswith("llama, 2 layers of 64")
    assert key.endswith("float32, cpu")
    assert found[key].token_s > 0
    assert len(said) == 2


def test_break_even_is_between_lengths_with_different_faster_methods(model):
    """Ratios 1/2 at 100 and 2 at 400: the middle of both logarithmic scales is 200."""
    assert measured.measured_breakeven({100: 0.5, 400: 2.0, 800: 3.0}) == pytest.approx(200)
    assert measured.measured_breakeven({100: 1.5, 400: 2.0}) == 0
    assert measured.measured_breakeven({100: 0.5, 400: 0.9}) == math.inf
    # a fast swap at a short length does not count if recompute is faster at a longer one
    assert measured.measured_breakeven({50: 1.1, 100: 0.5, 400: 2.0}) == pytest.approx(200)

    times = list(measured.measure_swap(model, QUICK_SWAP))
    assert [t.tokens for t in times] == [32, 96] * 2  # each length in every round
    page_bytes = 16 * 2 * 2 * 16 * 4  # tokens, K and V, heads, head_dim, float32
    assert [t.kv_bytes for t in times][:2] == [2 * pages * page_bytes for pages in (2, 6)]
    assert all(min(t.recompute_s, t.swap_s) > 0 for t in times)


# ---- timed steps ---------------------------------------------------------------------------------


RULES = ("full", "recent:cap=2,every=1,when=decode", "average:cap=12,every=4")


@pytest.fixture(scope="module")
def timed_model():
    return random_model(SHAPES["tiny"](), dtype=torch.bfloat16)


@pytest.mark.parametrize("evict", RULES)
def test_engine_runs_the_predicted_steps(timed_model, evict):
    """`timed_steps` compares the tokens of each step; this test also compares the slots."""
    shape = step_rates.RunShape(rows=3, prompt_tokens=30, new_tokens=9, evict=evict)
    engine = step_rates.static_engine(timed_model, shape)
    memory = engine.pool.kv.memory
    lane = next(table for table in memory.tables.values() if not table.group.private)

    for time in step_rates.timed_steps(timed_model, shape, engine):
        slots = {int(lane.num_slots[row].max()) for row in memory.live_rows}
        assert slots <= {time.step.before + time.step.new}  # no slots after the rows have ended
        assert time.seconds > 0
    assert not engine.has_work


def test_rows_that_do_not_run_concurrently_are_detected(timed_model):
    """A row of 103 tokens needs 28 KiB: 64 KiB hold two rows, not three."""
    shape = step_rates.RunShape(rows=3, prompt_tokens=100, new_tokens=4, evict="full")
    with pytest.raises(InvariantError, match="3 rows"):
        list(
            step_rates.timed_steps(
                timed_model, shape, step_rates.static_engine(timed_model, shape, 64 << 10)
            )
        )


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


def test_block_rates_without_eviction_equal_prefill_rates_of_usual_shapes(timed_model):
    shapes = step_rates.usual_shapes("full", context_tokens=1_024, config=QUICK_PROFILE)
    rates = step_rates.measure_step_rates(timed_model, shapes, repeats=1)
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
