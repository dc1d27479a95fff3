"""`python -m benchmarks.latent_forms`: chunks that attend to latents, or to expanded heads.

Prints processor times of attention of one row by both forms, and their ratio. `EXPANSION_COST` of
`quire.kernels.latent` is chosen by it.
"""

import time

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn.functional import linear

from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.latent import LatentHeads, LatentPlan, attend_pages
from quire.kernels.select import select_backend
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_spec
from quire.layout.pages import kv_pages

SHAPES = ((12, 256, 32, 64, 64), (16, 512, 64, 128, 128))
"""Heads, elements of a latent, of its rotated part, and of a projected key and value."""
PAGE_TOKENS = 16
_CPU = torch.device("cpu")


class _Heads(LatentHeads):
    """Projections that are always or never expanded."""

    expands = False

    def prefers_expanding(self, tokens: int, slots: int) -> bool:
        return self.expands


def times(
    shape: tuple[int, ...], dtype: torch.dtype, tokens: int, slots: int, rounds: int
) -> list[float]:
    """Seconds of attention of `tokens` new tokens to `slots` slots: folded, and expanded."""
    heads, rank, rotated, key_dim, value_dim = shape
    plain, columns = codec_spec(str(dtype).removeprefix("torch.")), -(-slots // PAGE_TOKENS)
    page = kv_pages(
        key=plain, value=plain, head_dim=rotated, value_dim=rank, heads=1, tokens=PAGE_TOKENS
    )
    views = PageStore(columns * page.page_bytes, _CPU).views(page)
    for plane in (views.key, views.value):
        plane.normal_()
    weight = (torch.randn(heads * (key_dim + value_dim), rank) * rank**-0.5).to(dtype)

    def expand(value: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        projected = linear(value[:, 0], weight)
        both = projected.view(*projected.shape[:2], heads, -1).transpose(1, 2)
        keys = torch.cat([both[..., :key_dim], key.expand(-1, heads, -1, -1)], dim=-1)
        return keys, both[..., key_dim:]

    latent = _Heads(lambda: weight, heads, key_dim, expand)
    table = torch.arange(columns).int().view(1, 1, columns)
    pages = LayerPages(views.key, views.value, table, torch.zeros(1, dtype=torch.int64), 0, 1)
    backend = select_backend(
        "auto", _CPU, dtype=dtype, head_dim={(rotated, rank)}, scratch_bytes=64 << 20
    ).backend
    query = torch.randn(tokens, heads, key_dim + rotated).to(dtype)
    fresh = torch.randn(tokens, 1, rotated).to(dtype), torch.randn(tokens, 1, rank).to(dtype)
    math = AttentionMath((key_dim + rotated) ** -0.5, latent=latent)
    step = StepShape.of(np.array([tokens], dtype=np.int32))
    lanes, found = LaneSlots(np.full((1, 1), slots, dtype=np.int32), None), []
    for latent.expands in (False, True):
        plan, measured = LatentPlan(backend, step, lanes, PAGE_TOKENS, 2 * (rank + rotated)), []
        for _ in range(rounds + 1):
            started_s = time.process_time()
            attend_pages(backend, plan, pages, math, query, fresh)
            measured.append(time.process_time() - started_s)
        found.append(min(measured[1:]))
    return found


def main(slots: int = 2_048, rounds: int = 3) -> None:
    """Print a line for each type, shape and number of new tokens; one thread."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            for tokens in (32, 64, 128, 256, 512):
                folded, expanded = times(shape, dtype, tokens, slots, rounds)
                print(f"{dtype} {shape} {tokens} tokens: folded {folded:.4f} s, ", end="")
                print(f"expanded {expanded:.4f} s, ratio {expanded / folded:.2f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
