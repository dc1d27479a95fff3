"""Claims of the benchmarks of rules, codecs and batches: by hand, and of small runs."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks import eviction, kvcrush
from benchmarks.batch_max import speed
from benchmarks.batch_max.config import BatchMaxConfig, arms_of, batch_max, decode_only, full_kv
from benchmarks.batch_max.floor import Limits, floor_claims
from benchmarks.common.attention import AttentionBench, AttentionShape
from benchmarks.common.models import SHAPES, random_model
from benchmarks.eviction import READY_ARMS, CostConfig, StepCost, ready_claims
from benchmarks.invariant import INVARIANT, PLAIN, InvariantConfig, Speeds, summarise
from benchmarks.quant.attention import AttentionTimes
from benchmarks.quant.attention import claims as attention_claims
from benchmarks.quant.capacity import codes_bytes, run_capacity, sequence_bytes
from benchmarks.quant.config import CapacityConfig, QuantAttentionConfig
from benchmarks.quant.throughput import CodecRate
from benchmarks.quant.throughput import claims as rate_claims
from benchmarks.throughput.arms import ArmResult
from benchmarks.weights import StepTimes, mean_kl, step_claims
from quire.policies.eviction import make_eviction
from support.kv_options import kv_config

# ---- rules ---------------------------------------------------------------------------------------


def test_stopwatch_charges_the_innermost_phase():
    """Selection from 1 to 11, nested signatures from 3 to 7: six seconds and four."""
    times = iter((1.0, 3.0, 7.0, 11.0))
    watch = kvcrush.Stopwatch(lambda: next(times))
    with watch.phase(kvcrush.SELECTION), watch.phase(kvcrush.SIGNATURES):
        pass
    assert (watch.seconds[kvcrush.SELECTION], watch.seconds[kvcrush.SIGNATURES]) == (6.0, 4.0)


def test_each_phase_takes_time_and_their_sum_is_below_the_run():
    config = kvcrush.OverheadConfig(
        model="tiny", rows=2, prompt_tokens=48, new_tokens=8, cap=32, every=4
    )
    runs = kvcrush.measure(config)

    for name, run in runs.items():
        there = {phase for phase in kvcrush.PHASES if run.seconds[phase] > 0}
        added = (
            {kvcrush.SCORING, kvcrush.SIGNATURES, kvcrush.REPRESENTATIVES}
            if name != kvcrush.ALONE
            else set()
        )
        assert there == {kvcrush.SELECTION, kvcrush.COMPACTION} | added
        assert 0 < run.fraction(*kvcrush.PHASES) < 1


def test_overhead_claims_match_hand_computation():
    def run(*seconds: int) -> kvcrush.Run:
        """Seconds of the phases in the order of `PHASES`; the run is 100 s."""
        by_phase = dict(zip(kvcrush.PHASES, map(float, seconds), strict=True))
        return kvcrush.Run(evict="", run_s=100.0, seconds=by_phase)

    runs = {"alone": run(1, 2, 0, 0, 3), "kvcrush": run(4, 2, 3, 5, 6)}
    runs |= {"heads": run(4, 2, 3, 7, 6), "kmeans": run(4, 2, 3, 45, 6)}

    assert kvcrush.claims(runs) == {
        "overhead_fraction": 0.1,
        "heads_overhead_fraction": 0.12,
        "added_overhead_fraction": 0.08,
        "heads_added_overhead_fraction": 0.1,
        "added_scoring_fraction": 0.03,
        "heads_added_scoring_fraction": 0.03,
        "kmeans_overhead_fraction": 0.5,
    }


def test_cost_claims_match_hand_computation():
    arms = {
        "full": (10.0, 1.0),
        "again": (9.9, 1.0),
        "recent": (10.0, 2.0),
        "rule": (12.5, 1.5),
        "h2o": (11.0, 1.5),
        "pressure_recent": (10.05, 1.0),
        "pressure_rule": (10.5, 1.0),
    }
    found = {a: StepCost(arm=a, step_s=s, schedule_s=p, cpu_s=2 * s) for a, (s, p) in arms.items()}

    assert eviction.claims([found]) == {
        "cost_h2o": pytest.approx(0.1),
        "eviction_cost_share": 0.04,
        "statistics_cost_share": pytest.approx(11 / 8 - 1),
        "pressure_recent_cost": pytest.approx(0.005),
        "pressure_rule_cost": pytest.approx(0.05),
        "equal_arms_difference": pytest.approx(-0.01),
    }


def test_cost_arms_decode_equally_many_steps():
    others = ("sinks:sinks=2",)
    config = CostConfig(model="tiny", others=others, cap=32, every=4, rows=2, repeats=1)

    [found] = eviction.measure_cost(config)

    expected = "full again recent rule sinks_sinks_2 pressure_recent pressure_rule"
    assert list(found) == expected.split()
    for one in found.values():
        assert 0 < one.schedule_s < one.step_s
    [ready] = eviction.measure_cost(config, READY_ARMS)
    assert tuple(ready) == READY_ARMS


def test_ready_claims_are_median_differences_per_layer():
    """Steps of 10 and 10.4, 10 and 10.8, 10 and 14 ms in 4 layers: 0.8 / 4 ms are 200 us."""

    def found(full_ms: float, ready_ms: float) -> dict[str, StepCost]:
        times = {"full": full_ms, "again": full_ms, "pressure_recent": ready_ms}
        return {
            a: StepCost(arm=a, step_s=ms / 1e3, schedule_s=0.0, cpu_s=0.0)
            for a, ms in times.items()
        }

    rounds = [found(10, 10.4), found(10, 10.8), found(10, 14)]

    assert ready_claims(rounds, 4) == {
        "ready_layer_us": pytest.approx(200),
        "ready_equal_layer_us": 0,
    }


# ---- codecs --------------------------------------------------------------------------------------


def test_kl_and_step_claims_match_hand_computation():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL = 1/2 log 2 + 1/2 log 2/3; the second row is equal."""
    plain = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    found = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
    assert mean_kl(plain, found) == pytest.approx((math.log(2) + math.log(2 / 3)) / 4)

    times = [StepTimes("auto", 1, (2.0, 4.0, 9.0)), StepTimes("int8", 1, (2.0, 2.0, 2.0))]
    times += [StepTimes("auto", 8, (6.0,)), StepTimes("int8", 8, (3.0,))]
    assert step_claims(times) == {
        "weights_int8_step_speedup_1": 2.0,
        "weights_int8_step_speedup_8": 2.0,
    }


def test_ratios_of_invariant_runs_are_medians_over_rounds():
    found = [Speeds(8, PLAIN, *rates) for rates in ((100.0, 10.0), (200.0, 20.0), (300.0, 10.0))]
    found += [Speeds(8, INVARIANT, *rates) for rates in ((50.0, 9.0), (160.0, 10.0), (180.0, 7.0))]
    claims = summarise(found)

    assert claims["plain_prefill_tokens_per_s_8"] == 200.0
    assert claims["invariant_decode_tokens_per_s_8"] == 9.0
    assert claims["invariant_over_plain_prefill_8"] == 0.6
    assert claims["invariant_over_plain_decode_8"] == 0.7

    times = {"total_s": 3.0, "prefill_s": 2.0, "decode_step_s": 0.1}
    timed = ArmResult(arm="quire", kv_bytes=0, tokens=((1,),), **times)
    work = InvariantConfig(prompt_tokens=100, new_tokens=11).workload(4)

    assert Speeds.of(PLAIN, work, timed) == Speeds(4, PLAIN, 200.0, 40.0)


def test_every_implementation_equals_torch_over_scattered_pages():
    shape = AttentionShape(batch=3, tokens=70, num_heads=4, num_kv_heads=2, head_dim=64)
    bench = AttentionBench(shape)
    found = {name: call().float().reshape(3, 4, 64) for name, call in bench.variants().items()}

    assert {"gathered", "sdpa"} <= set(found)
    for name, out in found.items():
        torch.testing.assert_close(out, found["sdpa"], rtol=0, atol=2e-2, msg=name)
    table = bench.pages.table
    assert table.unique().numel() == table.numel()
    assert bool((table.flatten().diff() != 1).any())


def test_codec_bytes_match_hand_computation_and_reach_the_claims():
    """128 channels: 16 bits; 8 bits and a scale; 4 bits and two groups' scales and zeros."""
    config = CapacityConfig()

    assert codes_bytes(config, "bfloat16") == 2 * 256
    assert codes_bytes(config, "int8") == 2 * (128 + 2)
    assert codes_bytes(config, "int4") == 2 * (64 + 2 * (2 + 2))
    assert codes_bytes(config, "int4_outliers") == 2 * (64 + 2 * (2 + 2) + 2 * (1 + 2))
    # a page of 16 slots and 2 heads of 4 channels: keys and values, and its page table entry
    config = CapacityConfig(head_dim=4, num_kv_heads=2, tokens=40)
    page = 2 * 16 * 2 * 4 * 2 + 4

    assert sequence_bytes(config, "bfloat16") == 3 * page
    assert sequence_bytes(config, "int8") == 3 * (2 * 16 * 2 * (4 + 2) + 4)
    full_precision = 192 + 4  # 5 records of 2 * 2 * 4 numbers of 2 bytes, in whole lines of 64
    assert sequence_bytes(config, "int8+sinks=1+residual=4") == 3 * 388 + full_precision

    claims = run_capacity(CapacityConfig()).claims

    assert claims["int8_capacity_ratio"] == pytest.approx(256 / 130)
    assert claims["int4_capacity_ratio"] == pytest.approx(256 / 72)
    assert claims["int4_outliers_capacity_ratio"] == pytest.approx(256 / 78)
    kinds = [f"{kind}capacity_ratio" for kind in ("", "net_", "kept_")]
    for codec in ("int8", "int4", "int4_outliers", "kivi4"):
        codes, net, full_precision = (claims[f"{codec}_{kind}"] for kind in kinds)
        assert codes >= net > full_precision > 1


def test_ratios_are_within_rounds_and_gains_relative_to_plain_kv():
    """The machine is twice as fast in the second round; ratios do not change."""
    times = AttentionTimes(
        tokens=4096,
        read_bytes_per_s=(100.0, 200.0, 100.0),
        kv_bytes={"bfloat16": 160, "int8": 80},
        step_s={"bfloat16": (4.0, 2.0, 4.0), "int8": (2.0, 1.0, 2.0)},
    )
    claims = attention_claims(QuantAttentionConfig(codecs=("int8",)), [times])

    assert claims["int8_attention_speedup"] == 2
    assert claims["int8_over_read_ceiling"] == pytest.approx(0.4)
    assert claims["bfloat16_over_read_ceiling"] == pytest.approx(0.4)

    plain = CodecRate(codec="none", rows=4, attention="native", step_s=(1.0, 2.0, 1.0))
    coded = CodecRate(codec="int8", rows=8, attention="native", step_s=(1.6, 3.2, 1.6))
    claims = rate_claims([plain, coded])
    assert claims["int8_gain_max_batch"] == pytest.approx(1.25)
    assert claims["int8_max_batch_ratio"] == 2
    assert claims["plain_tokens_per_s"] == 4


# ---- batches -------------------------------------------------------------------------------------

SIZES = {"prompt_tokens": 224, "new_tokens": 32, "continuous_prompts": 3}
TINY = BatchMaxConfig(model="tiny", caps=(56, 112), every=4, repeats=1, **SIZES)


def test_arms_match_the_papers_algorithms():
    arms = {arm.name: arm.evict for arm in arms_of((896, 1792), 64)}

    assert arms == {
        "fkv": "full",
        "ed_2": "recent:cap=2,every=1,when=decode",
        "ed_65": "recent:cap=65,every=64,when=decode",
        "bm_896": "average:cap=896,every=64",
        "bm_1792": "average:cap=1792,every=64",
        "end_896": "average:cap=896,when=prefill_end",
    }
    for evict in arms.values():
        assert make_eviction(evict).text == evict


@pytest.mark.paper
def test_batch_sizes_of_960_samples_equal_the_papers_set():
    """Section 4.2 of the paper: D = {1, 2, 3, 4, 5, 6, 8, ..., 32, 40, 48, ...}."""
    assert speed.batch_sizes()[:17] == (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20, 24, 30, 32, 40, 48)
    assert speed.largest_of(speed.batch_sizes(), 9) == 8
    assert speed.largest_of(speed.batch_sizes(), 0) == 0
    assert speed.batch_sizes(6) == (1, 2, 3, 6)


@pytest.mark.parametrize(
    ("arm", "rows"),
    [
        # 2 layers x 2 heads x 16 numbers x K and V x 2 B = 256 B a token; memory: 512 tokens
        (full_kv(), 2),
        # a prompt of 224 tokens with its positions (4 B a lane): 272 B a token, 60,928 B
        (decode_only(2), 2),
        # 56 tokens in 4 pages of 16: 64 slots x (272 + 16 B of sums) = 18,432 B: 7 in 131,072 B
        (batch_max(56, 4), 7),
    ],
)
def test_rows_that_fit_equals_rows_admitted_by_the_engine(arm, rows: int):
    model = random_model(SHAPES["tiny"](), dtype=torch.bfloat16)
    kv = kv_config(memory=512 * 256, evict=arm.evict, enable_prefix_caching=False)
    assert speed.rows_that_fit(model, kv, 224, 32) == rows
    assert speed.rows_that_fit(model, kv, 224, 32, most=1) == 1


def arm_time(arm: str, tokens_per_s: float, **changes: object) -> speed.ArmTime:
    made = {"mode": speed.STATIC, "arm": arm, "kv_bytes": 1000, "peak_bytes": 900, "batch": 2}
    times = {"prefill_s": 1.0, "decode_s": 2.0, "tokens_per_s": tokens_per_s, "preemptions": 0}
    return speed.ArmTime(**(made | times | changes))


def test_ratio_is_median_of_ratios_within_rounds_and_claims_use_the_first_cap():
    """Of 4/1, 10/5 and 10/3 the median is 10/3."""
    rounds = [
        [arm_time("fkv", 1.0), arm_time("bm_8", 4.0)],
        [arm_time("fkv", 5.0), arm_time("bm_8", 10.0)],
        [arm_time("fkv", 3.0), arm_time("bm_8", 10.0)],
    ]
    assert speed.ratio(rounds, speed.STATIC, "bm_8", "fkv") == pytest.approx(10 / 3)
    assert speed.ratio(rounds[:2], speed.STATIC, "bm_8", "fkv") == 3.0

    found = [
        arm_time("fkv", 10.0),
        arm_time("ed_2", 20.0),
        arm_time("ed_5", 19.0),
        arm_time("bm_56", 50.0, batch=8, peak_bytes=990),
        arm_time("bm_112", 40.0),
        arm_time("end_56", 15.0),
    ]
    at_once = [replace(t, mode=speed.CONTINUOUS, tokens_per_s=2 * t.tokens_per_s) for t in found]

    made = speed.claims(TINY, [[*found, *at_once]])

    assert made["bm_over_ed_throughput"] == 2.5
    assert made["bm_over_fkv_throughput"] == 5.0
    assert made["b2_bm_56_batch"] == 8
    assert made["b2_bm_56_peak_bytes"] == 990
    assert made["continuous_end_56_over_fkv"] == 1.5
    assert made["continuous_bm_112_tokens_per_s"] == 80.0


@pytest.mark.slow
def test_all_arms_run_once_and_the_claimed_ones_in_every_round(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speed, "rows_that_fit", partial(speed.rows_that_fit, most=16))
    result = speed.run_speed(
        replace(TINY, prompt_tokens=112, new_tokens=16, caps=(28, 56), repeats=2)
    )

    static, continuous = result.tables
    assert [row[1] for row in static.rows] == [2, 2, 1, 2, 1, 1]
    assert len(continuous.rows) == 6
    assert result.claims["b2_fkv_batch"] == result.claims["b2_ed_2_batch"] == 2
    assert result.claims["b2_bm_28_batch"] == 6  # 7 rows fit; 7 is not in the set
    for time in result.raw["rounds"][0]:
        assert 0 < time["peak_bytes"] <= time["kv_bytes"]
        assert time["mode"] == speed.CONTINUOUS or time["preemptions"] == 0
    assert set(result.charts[0].lines) == {"FKV", "ED, cap 2", "BM, cap 28"}


def test_floor_ratios_are_those_of_the_documents_example():
    """docs/maximize-batch.md, with rates of 23.8 GB/s, 2 TFLOP/s and 64-row products: 1.9, 2.6."""
    limits = Limits(
        read_bytes_per_s=23.8e9, flops_per_s=2e12, block_flops_per_s=2 * 64 * 2048 * 2048 / 0.55e-3
    )

    made = floor_claims(BatchMaxConfig(), limits, {"fkv": 2, "ed_2": 2, "bm_896": 8})

    assert round(made["floor_bm_over_ed"], 1) == 1.9
    assert round(made["floor_bm_over_fkv"], 1) == 2.6


# ---- the command ---------------------------------------------------------------------------------
