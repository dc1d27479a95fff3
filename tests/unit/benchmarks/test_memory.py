"""The memory benchmark: small runs of its parts, and claims computed from given inputs."""

import pytest

from benchmarks.memory import measured, simulated
from quire.sim.engine import ServedTokens, SimResult
from quire.sim.records import Gauges, RequestRecord
from quire.sim.traces.base import Trace

# ---- beams ---------------------------------------------------------------------------------------


@pytest.mark.paper
def test_four_beams_that_fork_at_50_last_tokens_use_140_of_128_pages():
    """The article says 1.05; its own formula gives 140 / 128."""
    runs = {(r.course, r.page_tokens): r for r in measured.measure_beams(measured.BeamConfig())}

    assert runs[measured.FORK_ONCE, 16].ratio == 140 / 128
    assert runs[measured.FORK_ONCE, 1].ratio == (2048 + 3 * 50) / 2048
    assert runs[measured.REORDER, 16].ratio <= 140 / 128
    assert 1 < runs[measured.ENGINE, 16].ratio <= 140 / 128
    assert measured.BeamConfig().floor_by_tokens == pytest.approx(1.073, abs=5e-4)


def test_beam_claim_is_largest_ratio_with_pages_of_16():
    def run(course: str, page_tokens: int, peak_bytes: int) -> measured.BeamRun:
        return measured.BeamRun(
            course=course, page_tokens=page_tokens, peak_bytes=peak_bytes, one_bytes=100
        )

    runs = [
        run(measured.FORK_ONCE, 16, 105),
        run(measured.REORDER, 16, 109),
        run(measured.FORK_ONCE, 64, 150),
    ]

    assert measured.beam_claims(runs)["beam4_memory_ratio"] == 1.09


# ---- a shared prefix -----------------------------------------------------------------------------


def test_later_requests_hit_the_system_prompt():
    """3 requests share 32 tokens, two whole pages: the first prefills them, the others hit 64."""
    config = measured.PrefixConfig(
        model="tiny", sharers=3, system_tokens=32, own_tokens=8, new_tokens=3, repeats=1
    )

    result = measured.run_prefix(config)

    assert result.claims["prefix_prefill_saved_fraction"] == 1.0
    assert result.claims["prefix_equal_answers"] == 1.0
    assert result.claims["prefix_kv_bytes_ratio"] < 1
    computed = 3 * 40 + 3 * 2  # prompts, and outputs without their last tokens
    assert result.claims["prefix_computed_ratio"] == (computed - 64) / computed


def test_prefix_claims_are_ratios_within_rounds():
    def run(
        cached: int, computed: int, peak: int, total_s: float, token: int
    ) -> measured.PrefixRun:
        return measured.PrefixRun(
            shares=cached > 0,
            cached_tokens=cached,
            computed_tokens=computed,
            peak_bytes=peak,
            total_s=total_s,
            tokens=((1,), (token,)),
        )

    config = measured.PrefixConfig(sharers=2, system_tokens=100)
    rounds = [run(90, 30, 50, 1.0, 2), run(0, 120, 100, 4.0, 2)]
    rounds += [run(90, 30, 50, 1.0, 2), run(0, 120, 100, 2.0, 3)]

    assert measured.prefix_claims(config, rounds) == {
        "prefix_prefill_saved_fraction": 0.9,
        "prefix_computed_ratio": 0.25,
        "prefix_kv_bytes_ratio": 0.5,
        "prefix_total_ratio": 0.375,
        "prefix_equal_answers": 0.75,
    }


# ---- with and without a cache --------------------------------------------------------------------


def test_total_time_is_the_sum_over_tokens():
    """After 0 and 1 tokens: 1 s, as at the shortest length; after 2: 2 s; after 3: 3 s."""
    assert measured.total_s({1: 1.0, 3: 3.0}, 4) == 1.0 + 1.0 + 2.0 + 3.0


def test_speedups_are_ratios_of_whole_generations():
    times = measured.TokenTimes(without_s={2: 6.0}, with_s={2: 2.0})

    assert measured.generation_claims(times) == {"cache_speedup_2": 3.0}


def test_recompute_is_measured_at_every_length():
    config = measured.GenerationConfig(model="tiny", lengths=(8, 64), steps=2, repeats=2)

    times = measured.measure_generation(config)

    assert [*times.without_s] == [*times.with_s] == [8, 64]
    assert min(*times.without_s.values(), *times.with_s.values()) > 0


# ---- sizes of pages ------------------------------------------------------------------------------


def test_steps_of_all_page_sizes_are_timed():
    config = measured.PageSizesConfig(
        sizes=(1, 16), model="tiny", rows=2, prompt_tokens=8, steps=1, repeats=3
    )

    times_s = measured.time_steps(config)

    assert {size: len(steps_s) for size, steps_s in times_s.items()} == {1: 3, 16: 3}


# ---- swap ----------------------------------------------------------------------------------------


def test_swap_table_has_a_row_per_length():
    config = measured.SwapConfig(
        model="tiny", lengths=(32, 96), repeats=1, max_num_batched_tokens=64
    )

    result = measured.run_swap(config)

    assert [row[0] for row in result.tables[0].rows] == [32, 96]


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
    runs = simulated.FairnessRuns(
        alone=run_with({"small": 0.5}, {}),
        flood=run_with({"small": 2.0, "large": 7.0}, {}),
        drain=run_with({}, {"small": 100, "large": 300}),
        step_s=1.0,
        prefill_s=3.0,
    )

    assert simulated.fairness_claims(runs) == {
        "small_tenant_p99_queue_over_limit": 0.5,
        "fairness_jain": 400**2 / (2 * (100**2 + 300**2)),
    }
