"""M2: the product that computes keys and values, [M, hidden] x [hidden, width]."""

import torch

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.shapes import SPECS
from quire.layout.model import ModelSpec
from quire.plan.fitting import fit_seconds

_LARGE_TOKENS = 8192
_TIMED_FLOPS = 1e12  # FLOPs of consecutive products on a GPU
_MOST_PRODUCTS = 100


def run_products(bench: DeviceBench) -> PartResult:
    """Run the part."""
    rows: list[tuple[Cell, ...]] = []
    claims: Numbers = {}
    for name in bench.config.product_models:
        found = _measured(bench, SPECS[name])
        rows += [(name, tokens, 1e3 * s, flops / s / 1e12) for tokens, flops, s in found]
        claims |= _claims(name, found)
    return PartResult(
        claims=claims | {"product_large_tflops": _large(rows)},
        tables=(
            Table(
                name="device-products",
                caption=(
                    f"{bench.where} Keys and values of M tokens in bfloat16, medians of "
                    f"{bench.config.repeats}. Expected on an H200: 500 to 750 TFLOP/s for "
                    f"{_LARGE_TOKENS:,} or more tokens, memory-bound at 64."
                ),
                columns=("model", "M", "ms", "TFLOP/s"),
                rows=tuple(rows),
            ),
        ),
    )


def product_flops(spec: ModelSpec, tokens: int) -> int:
    """FLOPs of the KV projection of a layer for the given number of tokens."""
    return 2 * tokens * spec.hidden_size * spec.kv_values_per_layer_token


def _measured(bench: DeviceBench, spec: ModelSpec) -> list[tuple[int, int, float]]:
    """Tokens, FLOPs and seconds of each size; all sizes use the operands of the largest."""
    target, most = bench.target, max(bench.config.product_tokens)
    width = spec.kv_values_per_layer_token
    values = most * (spec.hidden_size + width) + spec.hidden_size * width
    target.require(2 * values, f"a product of {most:,} tokens", "omit the part products")
    x, weight, out = (
        torch.randn(*shape, dtype=torch.bfloat16, device=target.device)
        for shape in ((most, spec.hidden_size), (spec.hidden_size, width), (most, width))
    )
    found = []
    for tokens in bench.config.product_tokens:
        flops = product_flops(spec, tokens)
        times = min(_MOST_PRODUCTS, max(1, int(_TIMED_FLOPS / flops))) if target.on_gpu else 1
        product_s = target.median(
            lambda: torch.mm(x[:tokens], weight, out=out[:tokens]),  # noqa: B023
            bench.config.repeats,
            times,
        )
        found.append((tokens, flops, product_s))
    return found


def _claims(name: str, found: list[tuple[int, int, float]]) -> Numbers:
    """recompute_token_ns_*: r of a layer, fitted to all sizes, without the fixed time of a call."""
    amounts = [(1, tokens) for tokens, _, _ in found]
    call_s, token_s = fit_seconds(amounts, [product_s for _, _, product_s in found])
    return {
        f"recompute_token_ns_{name}": 1e9 * token_s,
        f"recompute_call_us_{name}": 1e6 * call_s,
    }


def _large(rows: list[tuple[Cell, ...]]) -> float:
    """product_large_tflops: lowest rate for 8,192 or more tokens, or the largest size's rate."""
    large = [row for row in rows if int(row[1] or 0) >= _LARGE_TOKENS]
    return min(float(row[3] or 0) for row in large or rows[-1:])
