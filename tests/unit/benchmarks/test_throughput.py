from dataclasses import replace

import pytest
import torch

from benchmarks.common.attention import AttentionShape
from benchmarks.common.models import SHAPES, random_weights
from benchmarks.common.regret import RegretJudge
from benchmarks.common.workload import QUICK_WORKLOAD, Workload
from benchmarks.roofline.parts import Storage
from benchmarks.roofline.rates import Rates
from benchmarks.throughput import bench as measured
from benchmarks.throughput.arms import ArmResult
from quire.layout.model import ModelSpec

SPEC = ModelSpec.from_config(SHAPES["125m"]().to_dict())
STORAGE = Storage(  # bfloat16 weights of the reference shape, as they are
    weight_bytes={
        "qkv": 12 * 983_040 * 2,
        "output projection": 12 * 589_824 * 2,
        "mlp": 12 * 4_718_592 * 2,
        "head": 24_576_000 * 2,
    },
    arithmetic=dict.fromkeys(("qkv", "output projection", "mlp", "head", "attention"), "bfloat16"),
    kv_bytes_per_token=12_288,
)


def result(arm: str, total_s: float, decode_step_s: float = 0.1) -> ArmResult:
    times = {"total_s": total_s, "prefill_s": total_s / 2, "decode_step_s": decode_step_s}
    return ArmResult(arm=arm, kv_bytes=1000, tokens=((1, 2), (3, 4)), **times)


def round_of(quire_s: float, static_s: float, **changes: object) -> measured.Round:
    made = {
        "arms": (result("quire", quire_s), result("hf_static", static_s)),
        "attention_s": {"gathered": 6.0, "sdpa": 4.0, "native": 2.0, "native sums": 2.5},
        "read_bytes_per_s": 20e9,
        "rates": Rates(read_bytes_per_s=20e9, flops_per_s={"bfloat16": 500e9}),
    }
    return measured.Round(**(made | changes))


def test_ratio_is_median_of_ratios_within_rounds():
    """Of 1/2, 8/16 and 9/10 the median is 0.5; the ratio of the median times would be 8/10."""
    rounds = [round_of(1.0, 2.0), round_of(8.0, 16.0), round_of(9.0, 10.0)]
    regrets = {"quire": 0.25, "hf_static": 0.5}
    claims = measured.summarise(measured.ThroughputConfig(), SPEC, STORAGE, rounds, regrets)

    assert claims["total_ratio_vs_hf_static"] == 0.5
    assert "total_ratio_vs_hf_cb" not in claims
    assert claims["decode_ratio_vs_hf_static"] == 1.0
    assert claims["quire_total_s"] == 8.0
    assert claims["quire_tokens_per_s"] == 32 * 64 / 8.0
    assert claims["hf_static_kv_bytes"] == 1000
    assert claims["quire_mean_regret"] == 0.25


def test_decode_floor_matches_hand_computation():
    """The reference shape, 32 sequences, 544 tokens before.

    Weights: a layer has 768 * 64 * (12 + 4 + 4) of qkv, 768 * 768 of output, 3 * 768 * 2,048 of MLP
    and 2 norms of 768: 983,040 + 589,824 + 4,718,592 + 1,536 = 6,292,992; 12 of them,
    the head's 24,576,000 and the last norm's 768 make 100,092,672, or 200,185,344 B. Rows looked
    up: 32 * 768 * 2 = 49,152 B. KV: 1,024 B a layer and token, 12,288 B in all; 545 read and 1
    written: 32 * 546 * 12,288 = 214,695,936 B. At 20 GB/s the 414,930,432 B take 20.75 ms; the
    FLOPs at 500 GFLOP/s take less.
    """
    found = round_of(1.0, 1.0)

    floor_s = measured.decode_floor_s(SPEC, STORAGE, Workload(), found.rates)
    assert floor_s == pytest.approx(414_930_432 / 20e9)
    regrets = {"quire": 0.0, "hf_static": 0.0}
    claims = measured.summarise(measured.ThroughputConfig(), SPEC, STORAGE, [found], regrets)
    assert claims["decode_step_over_floor"] == pytest.approx(0.1 * 20e9 / 414_930_432)
    assert claims["product_flops_per_s_bfloat16"] == 500e9

    # a step of 20 ms is 0.964 of the floor: no claim
    found = round_of(1.0, 1.0, arms=(result("quire", 1.0, decode_step_s=0.02),))
    claims = measured.summarise(measured.ThroughputConfig(), SPEC, STORAGE, [found], {"quire": 0.0})
    assert "decode_step_over_floor" not in claims
    ratio = measured.decode_over_floor(measured.ThroughputConfig(), SPEC, STORAGE, [found])
    assert ratio == pytest.approx(0.02 * 20e9 / 414_930_432)


def test_attention_claims_match_hand_computation():
    """A batch of 2 x 5 tokens with K and V of one head of 4 numbers in 2 B: 160 B.

    In 2 s that is 80 B/s, of 160 B/s read: a half. Statistics: 2.5 s over 2 s, a quarter more.
    """
    shape = AttentionShape(batch=2, tokens=5, num_heads=1, num_kv_heads=1, head_dim=4)
    claims = measured.attention_claims(shape, [round_of(1.0, 1.0, read_bytes_per_s=160.0)])
    assert claims == {
        "attention_over_read_ceiling": 0.5,
        "statistics_overhead": 0.25,
        "gathered_over_native": 3.0,
    }


@pytest.mark.slow
def test_kv_bytes_of_arms_match_hand_computation():
    """A token has 2 layers * 2 heads * 16 numbers * K and V * 2 B = 256 B; 4 prompts.

    Quire ends with 47 tokens (the last is never read) in 3 pages of 16 slots; a static cache has 47
    too; continuous batching reserves one page of 64 slots for each.
    """
    bench = measured.ThroughputBench(
        replace(measured.QUICK_THROUGHPUT, repeats=1, peers=measured.PEERS)
    )
    [found] = bench.rounds()
    assert [arm.arm for arm in found.arms] == ["quire", *measured.PEERS]
    assert all(0 <= regret < 0.01 for regret in bench.regrets(found).values())  # near ties only
    kv_bytes = {arm.arm: arm.kv_bytes for arm in found.arms}

    slots = {"quire": 4 * 48, "hf_static": 4 * 47, "hf_cb": 4 * 64, "hf_one": 47}
    assert kv_bytes == {arm: number * 256 for arm, number in slots.items()}


def test_the_memory_of_a_hybrid_holds_states_and_pages():
    """125m-hybrid in float32, 32 sequences of 576 tokens.

    A state is 1,536 channels of 4 inputs and 6 * 128 * 128 numbers of 4 B: 417,792 B in each of 9
    layers. Of the 3 layers with attention, 36 pages of 16 tokens with 2 * 4 * 64 numbers. Slabs
    that are not full add less than a tenth.
    """
    work = Workload(model="125m-hybrid", dtype="float32")
    exact = 32 * (9 * 417_792 + 3 * 36 * 16 * 2 * 4 * 64 * 4)

    found = work.kv_bytes(ModelSpec.from_config(work.shape().to_dict()))

    assert exact <= found < 1.1 * exact


def test_wrong_output_has_regret():
    prompts = QUICK_WORKLOAD.prompt_ids()
    model = random_weights(SHAPES["tiny"](), dtype=torch.float32)
    judge = RegretJudge(model)
    with torch.inference_mode():
        logits = model(torch.tensor(prompts[:1])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())

    assert judge.mean_regret(prompts[:1], [[best]]) == pytest.approx(0.0, abs=1e-5)
    spread = float(logits.max() - logits.min())
    assert judge.mean_regret(prompts[:1], [[worst]]) == pytest.approx(spread, rel=1e-4)
