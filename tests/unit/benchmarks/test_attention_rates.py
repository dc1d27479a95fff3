"""The attention benchmark: every implementation attends over the same KV."""

import pytest
import torch

from benchmarks.common.attention import AttentionBench, AttentionShape

SHAPE = AttentionShape(batch=3, tokens=70, num_heads=4, num_kv_heads=2, head_dim=64)


def test_kv_bytes_of_a_batch():
    """3 sequences of 70 tokens, K and V of 2 heads of 64 elements, 2 B: 3 * 70 * 512 B."""
    assert SHAPE.kv_bytes == 3 * 70 * 512


def test_every_implementation_equals_torch():
    found = {
        name: call().float().reshape(3, 4, 64)
        for name, call in AttentionBench(SHAPE).variants().items()
    }

    assert {"gathered", "sdpa"} <= set(found)
    for name, out in found.items():
        torch.testing.assert_close(out, found["sdpa"], rtol=0, atol=2e-2, msg=name)


def test_pages_are_scattered():
    bench = AttentionBench(SHAPE)
    table = bench.pages.table

    assert table.unique().numel() == table.numel()
    assert bool((table.flatten().diff() != 1).any())


def test_without_the_c_library_the_torch_implementations_remain(monkeypatch: pytest.MonkeyPatch):
    from quire.kernels.native.library import NotLoaded

    monkeypatch.setattr(
        "benchmarks.common.attention.usable_library", lambda *_arguments: NotLoaded("none")
    )

    assert set(AttentionBench(SHAPE).variants()) == {"gathered", "sdpa"}
