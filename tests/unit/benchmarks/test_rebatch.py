from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.rebatch.bound import Costs, Forwards, fit, ideal_s
from benchmarks.rebatch.config import ALL_ARMS, EMBEDDING, QUICK_REBATCH, SHAPING, STATIC
from benchmarks.rebatch.load import TraceQuery, workload
from benchmarks.rebatch.parts import AtBatch, claims, measure
from benchmarks.rebatch.run import RebatchRun, SkippingClock

CPU = replace(QUICK_REBATCH, clock="cpu")
FEW = replace(CPU.w1, batches=(2, 4), queries=10)


def test_workloads_match_the_paper():
    """120 queries 1:1:2 of long (4,000 words) and short; 30 short ones."""
    w1, w2 = workload("w1", 1.0), workload("w2", 1.0)
    kinds = [(requested.prompt_tokens > 2_000, requested.new_tokens > 2_000) for requested in w1]

    assert Counter(kinds) == {(True, False): 30, (False, True): 30, (False, False): 60}
    assert len(w2) == 30
    first, second = ([n for q in w for n in (q.prompt_tokens, q.new_tokens)] for w in (w1, w2))
    assert all(40 <= n <= 520 or 4_680 <= n <= 5_720 for n in first)
    assert all(40 <= n <= 260 for n in second)
    scaled = [requested.prompt_tokens for requested in workload("w1", 0.01)]
    assert scaled == [max(2, round(requested.prompt_tokens * 0.01)) for requested in w1]


def test_clock_skips_idle_time_and_the_fit_recovers_costs():
    times = iter([5.0, 6.0, 7.0, 8.0, 9.0])
    clock = SkippingClock(lambda: next(times))
    clock.skip_to(11.0)
    assert clock() == pytest.approx(12.0)
    clock.skip_to(2.0)
    assert clock() == pytest.approx(14.0)

    decodes = [(r, r * c, 0.01 + 0.002 * r + 1e-5 * r * c) for r in (1, 4, 8) for c in (9, 50, 300)]
    reads = [(t, t * t, 0.02 - 1e-6 * t * t + 1e-3 * t) for t in (5, 50, 100, 200)]

    costs = fit([Forwards(decodes[:4], reads), Forwards(decodes[4:], [])])

    assert costs.decode == pytest.approx((0.01, 0.002, 1e-5))
    assert min(costs.read) >= 0
    assert costs.decode_s(8, 100) == pytest.approx(0.01 + 0.016 + 1e-3)


def test_list_scheduling_matches_hand_computation():
    """Two rows, queries (prompt, output) = (3, 2), (1, 3), (2, 1), (2, 2), first come first served.

    Reads cost 1 each, a step 10 and 1 for a slot.
        read 1, 2: 2 s. step: slots 4 + 2 = 16 s, the first has ended
        read 3 (one token: done), read 4: 2 s. step: slots 3 + 3 = 16 s, both have ended
    """
    load = tuple(
        TraceQuery(prompt_tokens=m, new_tokens=n) for m, n in ((3, 2), (1, 3), (2, 1), (2, 2))
    )
    costs = Costs(decode=(10.0, 0.0, 1.0), read=(1.0, 0.0, 0.0))
    assert ideal_s(load, 2, costs) == pytest.approx(2 + 16 + 2 + 16)
    assert ideal_s(load, 1, Costs((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))) == pytest.approx(4 + 8)


@pytest.fixture(scope="module")
def found() -> list[AtBatch]:
    return measure(CPU, FEW)


def test_all_arms_complete_with_the_counts_of_the_paper(found):
    """Same weights, greedy, float32: at least the first tokens are equal in all arms."""
    expected = [requested.new_tokens for requested in workload("w1", FEW.scale, FEW.queries)]

    for at in found:
        [runs] = at.rounds
        assert set(runs) == set(ALL_ARMS)
        for run in runs.values():
            assert [len(answer) for answer in run.answers] == expected
            assert run.answered == 1
            assert len(run.waited_s) == len(expected)
            assert run.token_curve()[-1][1] <= run.tokens == sum(expected)
        assert len({tuple(a[0] for a in run.answers) for run in runs.values()}) == 1

    # static rows are idle, BATON's are not; shaping has pads; embedding uses less memory
    for at in found:
        [runs] = at.rounds
        static, embedding, shaping = runs[STATIC], runs[EMBEDDING], runs[SHAPING]
        assert static.idle_fraction > 0.2
        assert embedding.idle_fraction == embedding.idle_while_queued == 0
        assert len(embedding.forwards.decodes) < len(static.forwards.decodes)
        assert shaping.peak_columns > embedding.peak_columns
        assert shaping.padded_fraction > embedding.padded_fraction


def made_up(arm: str, total_s: float, **options: object) -> RebatchRun:
    run = RebatchRun(arm, 4, 1, total_s=total_s, kv_peak_bytes=100, answers=[[1]])
    run.times_s, run.waited_s = [[0.5, 1.0]], [0.5]
    for name, value in options.items():
        setattr(run, name, value)
    return run


def test_claims_are_medians_of_ratios_within_rounds():
    rounds = [
        {
            STATIC: made_up(STATIC, 6.0),
            EMBEDDING: made_up(EMBEDDING, total_s, kv_peak_bytes=80),
            SHAPING: made_up(SHAPING, 5.0, answers=[[]]),
            "continuous": made_up("continuous", 1.5),
        }
        for total_s in (2.0, 3.0, 4.0)
    ]
    requested = replace(FEW, batches=(4,))

    numbers = claims(requested, [AtBatch(4, rounds, (2.0, 2.7, 2.0))])

    assert numbers["w1_batonpd_over_bound_b4"] == pytest.approx(0.9)
    assert numbers["w1_bound_b4"] == pytest.approx(3.0)
    assert numbers["w1_batonpd_over_static_b4"] == pytest.approx(2.0)
    assert numbers["w1_continuous_over_static_b4"] == pytest.approx(4.0)
    assert numbers["w1_batonpd_peak_over_static_b4"] == pytest.approx(0.8)
    assert numbers["w1_batonpd_over_baton_shaping"] == pytest.approx(5 / 3)
    assert numbers["w1_baton_shaping_completed_b4"] == 0
    assert numbers["w1_batonpd_idle_fraction"] == 0
