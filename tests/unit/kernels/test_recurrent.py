"""Updates of recurrent states in C against the functions of Transformers that they replace."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from quire.kernels.native.arguments import AVX2
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.recurrent import PagedState, RecurrentUpdates
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(AVX2, LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
ROUNDING = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS, PAGES = (1, 3), 8

pytestmark = pytest.mark.skipif(not PATHS, reason="no C extension with vector instructions")


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def updates(request: pytest.FixtureRequest) -> RecurrentUpdates:
    assert isinstance(LIBRARY, NativeLibrary)
    return RecurrentUpdates(LIBRARY, request.param)


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def paged(rows: int, *shape: int) -> PagedState:
    """A state in some of the pages of a plane that does not fill its pages.

    If its vectors can be halved, it has two pages; a head can then be in both.
    """
    vectors = math.prod(shape[:-1])
    count = 1 if vectors % 2 else 2
    elements = vectors // count * shape[-1]
    plane = seeded(PAGES, elements + 16)[:, :elements].view(PAGES, -1, 1, shape[-1])
    pages = torch.tensor([[4, 1], [2, 6], [0, 5]])[:rows, :count].contiguous()
    return PagedState(plane, pages, shape)


def other_pages(state: PagedState) -> Tensor:
    return state.plane[[page for page in range(PAGES) if page not in state.pages]].clone()


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING[dtype] * max(scale, 1))


@every_pair(
    dtype=ROUNDING,
    rows=ROWS,
    heads=[(1, 1), (2, 2), (2, 6)],
    dims=[(8, 8), (128, 128), (20, 36), (64, 72), (96, 200), (513, 8)],
    by_channel=[False, True],
    normed=[True, False],
)
def test_gated_delta_rule_equals_transformers(
    updates: RecurrentUpdates,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    by_channel: bool,
    normed: bool,
) -> None:
    """A head of 513 is wider than the library's, so that Transformers' function runs."""
    (key_heads, num_heads), (key_dim, value_dim) = heads, dims
    key_heads = num_heads if by_channel else key_heads
    # queries, keys and values are parts of one tensor, as behind a convolution
    widths = (key_heads * key_dim, key_heads * key_dim, num_heads * value_dim)
    parts = (seeded(rows, 1, sum(widths)) / key_dim**0.5).to(dtype).split(widths, dim=2)
    query, key, value = (
        part.unflatten(2, (-1, dim))
        for part, dim in zip(parts, (key_dim, key_dim, value_dim), strict=True)
    )
    decays = (key_dim,) if by_channel else ()
    options: dict[str, Any] = {
        "g": -seeded(rows, 1, num_heads, *decays).abs(),
        "beta": seeded(rows, num_heads, 1).to(dtype).sigmoid().transpose(1, 2),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": normed,
    }
    rule = qwen.torch_recurrent_gated_delta_rule
    rule = kimi.recurrent_kimi_delta_attention if by_channel else rule
    state = paged(rows, num_heads, key_dim, value_dim)
    others = other_pages(state)
    expected, last = rule(query, key, value, initial_state=state.load(), **options)

    found, returned = updates.delta_rule(rule, query, key, value, initial_state=state, **options)

    assert returned is state
    assert_near(found, expected, dtype)
    assert_near(state.load(), last, torch.float32)
    assert torch.equal(other_pages(state), others)


@every_pair(
    dtype=ROUNDING,
    rows=ROWS,
    heads=[(1, 1), (4, 2), (6, 6)],
    dims=[(8, 8), (64, 128), (24, 20), (5, 40), (8, 513)],
    of_heads=[True, False],
    with_gate=[False, True],
)
def test_mamba_2_equals_transformers(
    updates: RecurrentUpdates,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    of_heads: bool,
    with_gate: bool,
) -> None:
    """With parameters that are not equal within a head, Transformers' function runs."""
    (num_heads, groups), (dim, size) = heads, dims
    state = paged(rows, num_heads, dim, size)
    decay = -seeded(num_heads, 1, 1).abs().expand(-1, dim, size)
    arguments = (
        seeded(rows, num_heads, dim).to(dtype),
        seeded(rows, 1, num_heads).to(dtype).transpose(1, 2).expand(-1, -1, dim),
        decay if of_heads else decay.contiguous(),
        *seeded(2, rows, groups, size).to(dtype),
        seeded(num_heads, 1).to(dtype).expand(-1, dim),
    )
    gate = seeded(rows, num_heads, dim).to(dtype) if with_gate else None
    options: dict[str, Any] = {
        "z": gate,
        "dt_bias": seeded(num_heads, 1).expand(-1, dim),
        "dt_softplus": True,
    }
    last, others = state.load(), other_pages(state)
    update = mamba2.mamba2_selective_state_update
    expected = update(last, *arguments, **options)

    found = updates.selective_state(update, state, *arguments, **options)

    assert_near(found, expected, dtype)
    assert_near(state.load(), last, dtype)  # Transformers rounds what it adds
    assert torch.equal(other_pages(state), others)


@every_pair(
    dtype=ROUNDING,
    rows=ROWS,
    shape=[(3, 4, 4), (200, 4, 4), (64, 3, 3), (130, 4, 2)],
    biased=[False, True],
    activation=[None, "silu", "gelu"],
)
def test_convolution_equals_transformers(
    updates: RecurrentUpdates,
    dtype: torch.dtype,
    rows: int,
    shape: tuple[int, int, int],
    biased: bool,
    activation: str | None,
) -> None:
    """GELU is not in the library, so that Transformers' function runs."""
    channels, length, taps = shape
    state = paged(rows, channels, length)
    state.store(state.load().to(dtype))
    x = seeded(rows, 1, channels + 8).to(dtype)[..., :channels].transpose(1, 2)
    weight = seeded(channels, taps).to(dtype)
    bias = seeded(channels).to(dtype) if biased else None
    last, others = state.load().to(dtype), other_pages(state)
    update = qwen.causal_conv1d_update
    expected = update(x, last, weight, bias, activation)

    found = updates.convolve(update, x, state, weight, bias, activation)

    assert_near(found, expected, dtype)
    assert torch.equal(state.load(), last.float())
    assert torch.equal(other_pages(state), others)


@every_pair(
    dtype=ROUNDING,
    rows=ROWS,
    tokens=[2, 16, 75],
    heads=[(1, 1), (2, 6)],
    dims=[(8, 8), (128, 128), (20, 36), (513, 8)],
    by_channel=[False, True],
    begins=[True, False],
)
def test_gated_delta_rule_of_chunks_equals_transformers(
    updates: RecurrentUpdates,
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    by_channel: bool,
    begins: bool,
) -> None:
    (key_heads, num_heads), (key_dim, value_dim) = heads, dims
    key_heads = num_heads if by_channel else key_heads
    decays = (key_dim,) if by_channel else ()
    initial = None if begins else seeded(rows, num_heads, key_dim, value_dim)
    # channels are the last dimension of a convolution
    query, key = seeded(2, rows, key_heads, key_dim, tokens).to(dtype).permute(0, 1, 4, 2, 3)
    arguments = query, key, seeded(rows, tokens, num_heads, value_dim).to(dtype)
    options: dict[str, Any] = {
        "g": -seeded(rows, tokens, num_heads, *decays).abs(),
        "beta": seeded(rows, num_heads, tokens).to(dtype).sigmoid().transpose(1, 2),
        "initial_state": initial,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    rule = qwen.torch_chunk_gated_delta_rule
    rule = kimi.chunk_kimi_delta_attention if by_channel else rule
    before = None if initial is None else initial.clone()
    expected, last = rule(*arguments, **options)

    found, state = updates.delta_rule(rule, *arguments, **options)

    assert isinstance(state, Tensor)
    assert_near(found, expected, dtype)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
    assert before is None or torch.equal(before, initial)


@every_pair(
    dtype=ROUNDING,
    rows=ROWS,
    tokens=[2, 16, 75],
    heads=[(1, 1), (4, 2)],
    dims=[(8, 8), (64, 128), (24, 20), (8, 513)],
    begins=[True, False],
    limit=[math.inf, 0.5],
    skips=[True, False],
)
def test_mamba_2_of_chunks_equals_transformers(
    updates: RecurrentUpdates,
    dtype: torch.dtype,
    rows: int,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    begins: bool,
    limit: float,
    skips: bool,
) -> None:
    (num_heads, groups), (dim, size) = heads, dims
    initial = None if begins else seeded(rows, num_heads, dim, size)
    arguments = (
        seeded(rows, tokens, num_heads, dim).to(dtype),
        seeded(rows, tokens, num_heads).to(dtype),
        -seeded(num_heads).abs(),
        *seeded(2, rows, tokens, groups, size).to(dtype),
    )
    options: dict[str, Any] = {
        "chunk_size": 32,
        "D": seeded(num_heads) if skips else None,
        "dt_bias": seeded(num_heads),
        "dt_softplus": True,
        "dt_limit": (0.0, limit),
        "initial_states": initial,
        "return_final_states": True,
    }
    before = None if initial is None else initial.clone()
    expected, last = mamba2.mamba2_chunk_scan(*arguments, **options)

    found, state = updates.scan(mamba2.mamba2_chunk_scan, *arguments, **options)

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)
    assert before is None or torch.equal(before, initial)


def test_functions_are_replaced_by_name(updates: RecurrentUpdates) -> None:
    functions = {"causal_conv1d_update": qwen.causal_conv1d_update, "softmax": torch.softmax}

    assert set(updates.replacements(functions)) == {"causal_conv1d_update"}
