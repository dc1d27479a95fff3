"""The sweep of step budgets."""

from dataclasses import replace

from benchmarks.prefill.bench import QUICK_PREFILL, measure_prefill, summarise


def test_every_budget_is_measured_in_every_round():
    rounds = list(measure_prefill(replace(QUICK_PREFILL, repeats=2)))

    assert len(rounds) == 2
    for times_s in rounds:
        assert list(times_s) == list(QUICK_PREFILL.budgets)
        assert all(time_s > 0 for time_s in times_s.values())


def test_best_budget_has_smallest_median():
    """Medians: 3 and 2. Ratios of the first over the second, by round: 1.5, 6 / 2, 1 / 4."""
    claims = summarise([{256: 3.0, 512: 2.0}, {256: 6.0, 512: 2.0}, {256: 1.0, 512: 4.0}])

    assert claims == {
        "best_step_tokens": 512,
        "prefill_s_256": 3.0,
        "over_best_256": 1.5,
        "prefill_s_512": 2.0,
        "over_best_512": 1.0,
    }
