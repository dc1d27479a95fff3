"""`python -m benchmarks.latent_attention`: decode attention with joined keys against products.

One KV head holds a latent of 512 elements and a rotated key of 64 per token, and all query heads
read them: the time is that of matrix products. Each round measures the product rate of torch and of
the C library (the fastest of several), then attention once per format of the pages, so that a ratio
compares measurements close in time. The arithmetic is that of the queries. Prints medians.
"""

import statistics
from collections.abc import Callable

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.common.attention import fill_with_codes
from benchmarks.roofline.rates import PRODUCTS, RateProbe
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.select import select_backend
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_spec
from quire.layout.pages import kv_pages
from quire.profile.ceilings import seconds

FORMATS = {  # name: (codec of the value, type of the query and of plain planes)
    "float32": ("float32", torch.float32),
    "bfloat16": ("bfloat16", torch.bfloat16),
    "int8, float32 queries": ("int8", torch.float32),
    "int8, bfloat16 queries": ("int8", torch.bfloat16),
}
VALUE_DIM, KEY_DIM, PAGE_TOKENS = 512, 64, 16
_CPU = torch.device("cpu")


def attention(name: str, rows: int, heads: int, tokens: int, backend: str) -> Callable[[], Tensor]:
    """A call that attends once: one new token per row."""
    codec, dtype = FORMATS[name]
    plain = codec_spec(str(dtype).removeprefix("torch."))
    columns = -(-tokens // PAGE_TOKENS)
    page_class = kv_pages(
        key=plain,
        value=codec_spec(codec),
        head_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        heads=1,
        tokens=PAGE_TOKENS,
    )
    views = PageStore(rows * columns * page_class.page_bytes, _CPU).views(page_class)
    generator = torch.Generator().manual_seed(0)
    if views.coded is None:
        views.key.normal_(generator=generator)
        views.value.normal_(generator=generator)
    else:
        fill_with_codes(views.coded.key, KEY_DIM, generator)
        fill_with_codes(views.coded.value, VALUE_DIM, generator)
    scattered = torch.randperm(rows * columns, generator=generator).int()
    pages = LayerPages(
        key=views.key,
        value=views.value,
        table=scattered.view(rows, 1, columns),
        rows=torch.arange(rows),
        first_lane=0,
        num_lanes=1,
        coded=views.coded,
    )
    chosen = select_backend(
        backend, _CPU, dtype=dtype, head_dim={(KEY_DIM, VALUE_DIM)}, scratch_bytes=64 << 20
    ).backend
    lanes = LaneSlots(np.full((rows, 1), tokens, dtype=np.int32), None)
    plan = chosen.plan(StepShape.of(np.ones(rows, dtype=np.int32)), lanes, PAGE_TOKENS, 2 * 576)
    query = torch.randn(rows, heads, KEY_DIM + VALUE_DIM, generator=generator).to(dtype)
    math = AttentionMath(192**-0.5, joined=True)
    fresh = query[:, :1, :KEY_DIM], query[:, :1, KEY_DIM:]
    return lambda: chosen.attend(plan, pages, math, query, fresh)


def main(
    rows: int = 8, heads: int = 64, tokens: int = 4_096, rounds: int = 5, backend: str = "native"
) -> None:
    """Print times and ratios to the product rate of the queries' arithmetic."""
    calls = {name: attention(name, rows, heads, tokens, backend) for name in FORMATS}
    probe = RateProbe(("float32", "bfloat16"), 64 << 20, PRODUCTS)
    flops = 2 * rows * heads * tokens * (2 * VALUE_DIM + KEY_DIM)
    times: dict[str, list[float]] = {name: [] for name in FORMATS}
    ratios: dict[str, list[float]] = {name: [] for name in FORMATS}
    for call in calls.values():
        call()
    for _ in range(rounds):
        rates = probe.measure()
        for name, call in calls.items():
            elapsed_s = seconds(call)
            times[name].append(elapsed_s)
            arithmetic = str(FORMATS[name][1]).removeprefix("torch.")
            ratios[name].append(flops / elapsed_s / rates.flops_per_s[arithmetic])
    threads = torch.get_num_threads()
    print(f"{rows} rows x {tokens:,} tokens, {heads} query heads, {threads} threads")
    for name in FORMATS:
        elapsed_s, ratio = statistics.median(times[name]), statistics.median(ratios[name])
        rate = flops / elapsed_s / 1e9
        print(f"{name:24} {1e3 * elapsed_s:7.1f} ms {rate:7.1f} GFLOP/s {ratio:6.2f} of products")


if __name__ == "__main__":
    typer.run(main)
