"""The memory benchmark: small runs of its parts, and claims computed from given inputs."""

from dataclasses import replace

import pytest

from benchmarks.common.command import names_of, run_named
from benchmarks.memory import allocator, beam, fairness, generation, page_sizes, prefix, swapping
from benchmarks.memory.config import QUICK_MEMORY
from benchmarks.memory.parts import PARTS
from benchmarks.memory.swapping import SwapConfig
from benchmarks.overhead import OverheadConfig
from quire.errors import ConfigError, UnknownName
from quire.sim.engine import ServedTokens, SimResult
from quire.sim.records import Gauges, RequestRecord
from quire.sim.traces.base import Trace

# ---- parts by name -------------------------------------------------------------------------------


def test_parts_run_in_their_own_order():
    assert names_of("", PARTS) == tuple(PARTS)
    assert names_of("beam, waste", PARTS) == ("waste", "beam")


def test_unknown_part_raises():
    with pytest.raises(UnknownName, match="wastes"):
        names_of("waste,wastes", PARTS)
    with pytest.raises(ConfigError, match="each part once"):
        names_of("waste,waste", PARTS)


def test_run_parts_records_each_duration():
    small = replace(QUICK_MEMORY, beam=beam.BeamConfig(tokens=64, apart=8))

    [(name, result)] = run_named(["beam"], PARTS, small)

    assert name == "beam"
    assert result.seconds > 0
    assert result.claims["beam4_memory_ratio"] > 1


# ---- beams ---------------------------------------------------------------------------------------


@pytest.mark.paper
def test_four_beams_that_fork_at_50_last_tokens_use_140_of_128_pages():
    """The article says 1.05; its own formula gives 140 / 128."""
    runs = {(r.course, r.page_tokens): r for r in beam.measure_beams(beam.BeamConfig())}

    assert runs[beam.FORK_ONCE, 16].ratio == 140 / 128
    assert runs[beam.FORK_ONCE, 1].ratio == (2048 + 3 * 50) / 2048
    assert runs[beam.REORDER, 16].ratio <= 140 / 128
    assert 1 < runs[beam.ENGINE, 16].ratio <= 140 / 128
    assert beam.floor_by_tokens(beam.BeamConfig()) == pytest.approx(1.073, abs=5e-4)


def test_beam_claim_is_largest_ratio_with_pages_of_16():
    def run(course: str, page_tokens: int, peak_bytes: int) -> beam.BeamRun:
        return beam.BeamRun(
            course=course, page_tokens=page_tokens, peak_bytes=peak_bytes, one_bytes=100
        )

    runs = [run(beam.FORK_ONCE, 16, 105), run(beam.REORDER, 16, 109), run(beam.FORK_ONCE, 64, 150)]

    assert beam.claims(beam.BeamConfig(), runs)["beam4_memory_ratio"] == 1.09


# ---- a shared prefix -----------------------------------------------------------------------------


def test_later_requests_hit_the_system_prompt():
    """3 requests share 32 tokens, two whole pages: the first prefills them, the others hit 64."""
    config = prefix.PrefixConfig(
        model="tiny", sharers=3, system_tokens=32, own_tokens=8, new_tokens=3, repeats=1
    )

    result = prefix.run_prefix(config)

    assert result.claims["prefix_prefill_saved_fraction"] == 1.0
    assert result.claims["prefix_equal_answers"] == 1.0
    assert result.claims["prefix_kv_bytes_ratio"] < 1
    computed = 3 * 40 + 3 * 2  # prompts, and outputs without their last tokens
    assert result.claims["prefix_computed_ratio"] == (computed - 64) / computed


def test_prefix_claims_are_ratios_within_rounds():
    def run(cached: int, computed: int, peak: int, total_s: float, token: int) -> prefix.PrefixRun:
        return prefix.PrefixRun(
            shares=cached > 0,
            cached_tokens=cached,
            computed_tokens=computed,
            peak_bytes=peak,
            total_s=total_s,
            tokens=((1,), (token,)),
        )

    config = prefix.PrefixConfig(sharers=2, system_tokens=100)
    rounds = [run(90, 30, 50, 1.0, 2), run(0, 120, 100, 4.0, 2)]
    rounds += [run(90, 30, 50, 1.0, 2), run(0, 120, 100, 2.0, 3)]

    assert prefix.claims(config, rounds) == {
        "prefix_prefill_saved_fraction": 0.9,
        "prefix_computed_ratio": 0.25,
        "prefix_kv_bytes_ratio": 0.5,
        "prefix_total_ratio": 0.375,
        "prefix_equal_answers": 0.75,
    }


# ---- with and without a cache --------------------------------------------------------------------


def test_total_time_is_the_sum_over_tokens():
    """After 0 and 1 tokens: 1 s, as at the shortest length; after 2: 2 s; after 3: 3 s."""
    assert generation.total_s({1: 1.0, 3: 3.0}, 4) == 1.0 + 1.0 + 2.0 + 3.0


def test_speedups_are_ratios_of_medians():
    def time(tokens: int, without_s: float, with_s: float) -> generation.TokenTime:
        return generation.TokenTime(tokens=tokens, without_s=without_s, with_s=with_s)

    times = [time(2, 4.0, 1.0), time(2, 6.0, 2.0), time(2, 90.0, 3.0)]

    assert generation.claims(times) == {"cache_speedup_2": 3.0, "cache_speedup_last_token_2": 3.0}


def test_recompute_is_measured_at_every_length():
    config = generation.GenerationConfig(model="tiny", lengths=(8, 64), steps=2, repeats=2)

    times = generation.measure_generation(config)

    assert [time.tokens for time in times] == [8, 64, 8, 64]
    assert all(time.without_s > 0 and time.with_s > 0 for time in times)


# ---- the allocator -------------------------------------------------------------------------------


def test_allocator_frees_every_allocated_page():
    """2 rows of 16 and 17 tokens grow to 20 and 21: 1 and 2 pages allocated, 2 and 2 freed.

    12 lanes. The engine does not run: the test uses the memory alone.
    """
    config = allocator.AllocatorConfig(
        overhead=OverheadConfig(rows=2, prompt_tokens=16, repeats=2), steps=4
    )

    times = allocator.measure_allocator(config)

    assert [time.pages for time in times] == [12 * (1 + 2 + 2 + 2)] * 2


def test_allocator_share_is_relative_to_a_step():
    times = [
        allocator.AllocatorTime(pages=100, pages_s=pages_s, step_s=step_s)
        for pages_s, step_s in ((1.0, 0.01), (2.0, 0.02), (4.0, 0.03))
    ]
    steps = [{"step_s": 2.0, "share": 0.1}]

    assert allocator.claims(times, steps) == {
        "allocator_pages_per_s": 50.0,
        "allocator_step_s": 0.02,
        "decode_step_s": 2.0,
        "allocator_step_share": 0.01,
        "bookkeeping_share": 0.1,
    }


# ---- sizes of pages ------------------------------------------------------------------------------


def test_steps_of_all_page_sizes_are_timed():
    config = page_sizes.PageSizesConfig(
        sizes=(1, 16), model="tiny", rows=2, prompt_tokens=8, steps=1, repeats=3
    )

    times_s = page_sizes.time_steps(config)

    assert {size: len(steps_s) for size, steps_s in times_s.items()} == {1: 3, 16: 3}


def test_page_size_claims_use_the_median_step():
    found = page_sizes.PageSize(
        tokens=16, waste_fraction=0.5, table_fraction=0.25, step_s=(1.0, 9.0, 2.0)
    )

    assert page_sizes.claims([found]) == {
        "page_16_waste_fraction": 0.5,
        "page_16_table_fraction": 0.25,
        "page_16_step_s": 2.0,
    }


# ---- swap ----------------------------------------------------------------------------------------


def test_swap_table_has_a_row_per_length():
    config = swapping.SwappingConfig(
        model="tiny", swap=SwapConfig(lengths=(32, 96), repeats=1, max_num_batched_tokens=64)
    )

    result = swapping.run_swap(config)

    assert [row[0] for row in result.tables[0].rows] == [32, 96]
    assert {"swap_s_32", "recompute_s_96"} <= set(result.claims)


# ---- fairness ------------------------------------------------------------------------------------


def run_with(queues_s: dict[str, float], served: dict[str, int]) -> SimResult:
    """A result with one request of each tenant, which waited so long."""
    result = SimResult(Trace(name="", format="", requests=()), 0, gauges=Gauges())
    for tenant, queue_s in queues_s.items():
        result.records.append(
            RequestRecord(
                line=1,
                tenant=tenant,
                arrival_s=1.0,
                prompt_tokens=1,
                answer_tokens=1,
                admitted_s=1.0 + queue_s,
                first_token_s=9.0,
                finish_s=9.0,
            )
        )
    result.served = ServedTokens(served)
    result.served.tokens.update(served)
    return result


def test_fairness_claims_compare_with_the_small_tenant_alone():
    runs = fairness.FairnessRuns(
        alone=run_with({"small": 0.5}, {}),
        flood=run_with({"small": 2.0, "large": 7.0}, {}),
        drain=run_with({}, {"small": 100, "large": 300}),
        step_s=1.0,
        prefill_s=3.0,
    )

    assert fairness.claims(runs) == {
        "small_tenant_p99_queue_s": 2.0,
        "small_tenant_p99_queue_alone_s": 0.5,
        "small_tenant_p99_queue_limit_s": 4.0,
        "small_tenant_p99_queue_over_limit": 0.5,
        "small_tenant_p99_queue_ratio": 4.0,
        "fairness_jain": 400**2 / (2 * (100**2 + 300**2)),
    }
