import json
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.bench import GpuBench, Target
from benchmarks.gpu.command import PARTS
from benchmarks.gpu.compute import floor_seconds, prefill_flops
from benchmarks.gpu.config import QUICK_GPU, SPECS

CLAIMS = {
    "equality": "equal_outputs",
    "kernels": "attention_copy_share attention_copy_share_int8",
    "step": "step_over_floor graphs_gain async_gain static_step_over_quire",
    "prefill": "prefill_share",
    "batch_max": "batch_max_speedup batch_max_rows",
    "link": "h2d_pageable_gb_per_s d2h_pageable_gb_per_s duplex_gb_per_s h2d_call_us",
    "offload": "swap_speedup",
    "kvpr": "kvpr_latency_gain kvpr_throughput_gain kvpr_one_row_gain "
    "kvpr_latency_over_transformers kvpr_equal_outputs",
    "rebatch": "rebatch_speedup",
}


def cpu_bench(**changes) -> GpuBench:
    small = {"repeats": 1, "kvpr_rows": 2, "kvpr_tokens": 64, "kvpr_chunk": 8}
    return GpuBench.of(replace(QUICK_GPU, device="cpu", **small | changes))


@pytest.mark.parametrize("name", PARTS)
def test_part_runs_on_cpu(name):
    result = PARTS[name](cpu_bench())

    assert set(result.claims) >= set(CLAIMS[name].split())
    assert all(value > 0 for name, value in result.claims.items() if "error" not in name)
    assert all(table.rows for table in result.tables)
    rows = [(table.columns, row) for table in result.tables for row in table.rows]
    assert all(len(row) == len(columns) for columns, row in rows)
    assert not [cell for _, row in rows for cell in row if str(cell).startswith("failed")]
    json.dumps(result.to_json())
    if name in ("equality", "kvpr"):
        assert result.claims[f"{name}_equal_outputs".removeprefix("equality_")] == 1
    if name == "kvpr":
        recomputed = [row[5] for row in result.tables[0].rows if row[2] == "partial recompute"]
        assert len(recomputed) == 3
        assert max(recomputed) > 0


def test_floors_count_weights_and_kv_once_and_flops_two_per_weight():
    config = cpu_bench(rows=2, step_context=100).config
    bench = GpuBench(config, Target.named("cpu"), {"copy": 1e6})  # bytes per second
    spec = SPECS["toy-grouped"]
    layer = 64 * 2 * 64 + 64 * spec.kv_values_per_layer_token + 3 * 64 * 96
    weights = 4 * (3 * layer + 128 * 64)

    kv_bytes = 2 * 100 * spec.num_layers * spec.kv_values_per_layer_token * 4
    assert floor_seconds(bench) == pytest.approx((weights + kv_bytes) / 1e6, rel=0.01)
    # llama-3-8B: 6.98e9 weights of layers; 1,000 tokens: 1.396e13 + 2 x 32 x 1e6 x 4096
    expected = 2 * 6.98e9 * 1_000 + 2.62e11 + 2 * 4_096 * 128_256
    assert prefill_flops(SPECS["Llama-3-8B"], 1_000) == pytest.approx(expected, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTS)
def test_part_runs_on_gpu(name):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    assert set(PARTS[name](GpuBench.of(replace(QUICK_GPU, device="cuda"))).claims) >= set(
        CLAIMS[name].split()
    )
