"""The rebatch benchmark: loads, the bound, counts of runs, claims, the command."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.rebatch.bound import Costs, Forwards, fit, ideal_s
from benchmarks.rebatch.config import (
    ALL_ARMS,
    EMBEDDING,
    QUICK_REBATCH,
    SHAPING,
    STATIC,
    RebatchConfig,
)
from benchmarks.rebatch.load import TraceQuery, recorded, workload
from benchmarks.rebatch.parts import AtBatch, claims, measure
from benchmarks.rebatch.run import Models, RebatchRun, SkippingClock, run_arm

CPU = replace(QUICK_REBATCH, clock="cpu")
FEW = replace(CPU.w1, batches=(2, 4), queries=10)


# ---- loads -----------------------------------------------------------------------------------


def test_workloads_match_the_paper():
    """120 queries 1:1:2 of long (4,000 words) and short; 30 short ones."""
    w1, w2 = workload("w1", 1.0), workload("w2", 1.0)
    kinds = [(requested.prompt_tokens > 2_000, requested.new_tokens > 2_000) for requested in w1]

    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        (True, False): 30,
        (False, True): 30,
        (False, False): 60,
    }
    assert len(w2) == 30
    assert all(
        40 <= n <= 260 for requested in w2 for n in (requested.prompt_tokens, requested.new_tokens)
    )
    lengths = [n for requested in w1 for n in (requested.prompt_tokens, requested.new_tokens)]
    assert all(40 <= n <= 520 or 4_680 <= n <= 5_720 for n in lengths)


def test_lengths_are_scaled_to_at_min_two():
    full, scaled = workload("w1", 1.0), workload("w1", 0.01)

    assert [requested.prompt_tokens for requested in scaled] == [
        max(2, round(requested.prompt_tokens * 0.01)) for requested in full
    ]


def test_trace_scales_gaps_and_marks_urgent_requests():
    load = recorded(16, 0.1, 30.0, urgent_every=8)

    assert load[0].arrival_s == 0
    assert load[-1].arrival_s == pytest.approx(30.0)
    assert [requested.priority for requested in load].count(0) == 2
    assert load[0].prompt_tokens == 37  # 374 in the file
    assert load[1].arrival_s / load[2].arrival_s == pytest.approx(4.315 / 4.542, rel=1e-3)


def test_clock_skips_idle_time():
    times = iter([5.0, 6.0, 7.0, 8.0, 9.0])
    clock = SkippingClock(lambda: next(times))

    clock.skip_to(11.0)

    assert clock() == pytest.approx(12.0)
    clock.skip_to(2.0)
    assert clock() == pytest.approx(14.0)


# ---- the bound -------------------------------------------------------------------------------


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


def test_fit_recovers_costs_and_is_never_negative():
    decodes = [(r, r * c, 0.01 + 0.002 * r + 1e-5 * r * c) for r in (1, 4, 8) for c in (9, 50, 300)]
    reads = [(t, t * t, 0.02 - 1e-6 * t * t + 1e-3 * t) for t in (5, 50, 100, 200)]

    costs = fit([Forwards(decodes[:4], reads), Forwards(decodes[4:], [])])

    assert costs.decode == pytest.approx((0.01, 0.002, 1e-5))
    assert min(costs.read) >= 0
    assert costs.decode_s(8, 100) == pytest.approx(0.01 + 0.016 + 1e-3)


# ---- runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> list[AtBatch]:
    return measure(CPU, FEW)


def test_all_arms_complete_all_queries(found):
    expected = [requested.new_tokens for requested in workload("w1", FEW.scale, FEW.queries)]

    for at in found:
        [runs] = at.rounds
        assert set(runs) == set(ALL_ARMS)
        for run in runs.values():
            assert [len(answer) for answer in run.answers] == expected
            assert run.answered == 1
            assert len(run.waited_s) == len(expected)
            assert run.token_curve()[-1][1] <= run.tokens == sum(expected)


def test_dense_and_paged_arms_generate_equal_tokens(found):
    """Same weights, greedy, float32: at least the first tokens are equal in all arms."""
    for at in found:
        firsts = {tuple(a[0] for a in run.answers) for run in at.rounds[0].values()}
        assert len(firsts) == 1


def test_counts_match_the_papers_statements(found):
    """Static rows are idle, BATON's are not; shaping has pads; embedding uses less memory."""
    for at in found:
        [runs] = at.rounds
        static, embedding, shaping = runs[STATIC], runs[EMBEDDING], runs[SHAPING]
        assert static.idle_fraction > 0.2
        assert embedding.idle_fraction == embedding.idle_while_queued == 0
        assert len(embedding.forwards.decodes) < len(static.forwards.decodes)
        assert shaping.peak_columns > embedding.peak_columns
        assert shaping.padded_fraction > embedding.padded_fraction


def test_shaping_records_why_it_ended_early():
    config = replace(CPU, shaping_columns=1)
    load = workload("w1", 0.02, 16)

    run = run_arm(Models.of("tiny"), load, SHAPING, 4, config)

    assert "raise capacity_tokens, or use a batcher without empty columns" in run.ended
    assert 0 < run.answered < 1


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


def test_full_size_claims_have_the_documented_names():
    config = RebatchConfig()
    for requested in (config.w1, config.w2):
        runs = {arm: made_up(arm, 1.0) for arm in requested.arms}
        numbers = claims(requested, [AtBatch(batch, [runs], [1.0]) for batch in requested.batches])
        for batch in requested.batches:
            assert f"{requested.name}_batonpd_over_bound_b{batch}" in numbers
    assert config.w1.batches == (4, 8)
    assert config.w2.batches == (2, 4, 6, 8, 10)


@pytest.mark.slow
def test_command_prints_one_json_object(tmp_path):
    requested = ["rebatch", "--quick", "--parts", "w2,trace", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*requested, "--clock", "cpu"])

    assert result.exit_code == 0, result.output
    run = json.loads(result.output.strip().splitlines()[-1])
    assert run["name"] == "bench rebatch"
    assert run["quick_figures"]["w2_batonpd_over_static_b4"] > 0
    trace = run["arms"]["trace"]["raw"]
    assert trace["rounds"][0]["baton_pd"]["kv_peak_bytes"] <= trace["memory_bytes"]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"rebatch.json", "rebatch_w2_b10.csv", "rebatch_w2_kv.svg", "rebatch_trace.csv"} <= names


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--model", "huge"), "choose from 1100m, 125m"),
        (("--parts", "w3"), "w1"),
        (("--clock", "sun"), "cpu"),
    ],
)
def test_unknown_names_raise(option, message):
    result = CliRunner().invoke(app, ["rebatch", *option])

    assert result.exit_code == 2
    assert message in result.output
