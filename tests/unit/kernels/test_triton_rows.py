"""Row-wise kernels of fused layers equal the modules of Transformers."""

import pytest
import torch
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.triton import hardware
from quire.kernels.triton.hardware import RowShape
from support.interpreted import CPU, FAILURES, interpreted

row_calls = interpreted("launch")
row_self_test = interpreted("self_test")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


SHAPES = [RowShape(320, 32, 32), RowShape(96, 80, 32), RowShape(48, 16, 8)]


@pytest.fixture(autouse=True)
def fresh_results():
    """No results of other tests."""
    hardware._wrong_kernels.cache_clear()
    yield
    hardware._wrong_kernels.cache_clear()


def rows_of(count, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, width, generator=generator) * 4).to(dtype)


def norm_of(width, dtype):
    norm = LlamaRMSNorm(width, EPS).to(dtype)
    norm.weight.data = rows_of(1, width, dtype, seed=9)[0]
    return norm


def assert_near(found, expected):
    """Equal up to one rounding: sums are in another order."""
    assert found.dtype == expected.dtype
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, atol=eps / 4, rtol=2 * eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 48, 256, 1000])
@torch.inference_mode()
def test_norm_with_the_residual_sum(dtype, width):
    stream, delta, norm = (
        (rows_of(3, width, dtype, n) for n in range(2)),
        None,
        norm_of(width, dtype),
    )
    stream, delta = stream
    summed = stream + delta

    found = row_calls.normed(stream, delta, norm.weight, EPS)

    assert torch.equal(stream, summed)
    assert_near(found, norm(summed))


@torch.inference_mode()
def test_norm_alone_leaves_the_stream():
    stream, norm = rows_of(3, 64, torch.float32), norm_of(64, torch.float32)
    before = stream.clone()

    assert_near(row_calls.normed(stream, None, norm.weight, EPS), norm(before))
    assert torch.equal(stream, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
@torch.inference_mode()
def test_norms_of_heads_leave_values(dtype, head_dim):
    norms = norm_of(head_dim, dtype), LlamaRMSNorm(head_dim, EPS).to(dtype)
    joint = rows_of(4, 9 * head_dim, dtype)
    heads = joint.view(4, 9, head_dim)
    expected = norms[0](heads[:, :5]), norms[1](heads[:, 5:7]), heads[:, 7:].clone()

    row_calls.norm_query_and_key(joint, (5, 2), (norms[0].weight, norms[1].weight), EPS)

    assert_near(heads[:, :5], expected[0])
    assert_near(heads[:, 5:7], expected[1])
    assert torch.equal(heads[:, 7:], expected[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_gated_silu(dtype, width):
    both = rows_of(3, 2 * width, dtype)
    both[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = both.chunk(2, dim=1)

    assert_near(row_calls.gated(both), F.silu(gate) * up)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_kernels_are_used(dtype, shape):
    assert hardware.why_no_rows(CPU, dtype, shape) is None


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("normed", "RMSNorm"),
        ("norm_query_and_key", "the norms of heads"),
        ("gated", "the gated activation"),
    ],
)
def test_wrong_kernels_are_not_used(monkeypatch, caplog, name, kernel):
    right = getattr(row_calls, name)

    def wrong(rows, *args):
        out = right(rows, *args)
        (rows if out is None else out)[0, 0] += 30
        return out

    monkeypatch.setattr(row_calls, name, wrong)
    reason = hardware.why_no_rows(CPU, torch.bfloat16, SHAPES[0])
    assert f"{reason}; please report it" in caplog.text
    assert reason == f"wrong results of {kernel} on cpu"


def test_wrong_rope_is_not_used(monkeypatch):
    monkeypatch.setattr(row_self_test.launch, "rotate", lambda *_: None)
    assert hardware.why_no_rows(CPU, torch.float32, SHAPES[0]) == "wrong results of RoPE on cpu"


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_kernels_that_cannot_run_are_not_used(monkeypatch, error):
    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(row_self_test, "wrong_kernels", fail)
        assert str(error)[:20] in hardware.why_no_rows(CPU, torch.float32, SHAPES[0])
    assert hardware.why_no_rows(CPU, torch.float32, SHAPES[0]) is None


def test_reason_without_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "run on NVIDIA GPUs" in hardware.why_no_rows(CPU, torch.float32, SHAPES[0])
