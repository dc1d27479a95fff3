"""RMSNorm, RoPE and activation codes in C against torch, and chains of calls."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.native.arguments import AVX2
from quire.kernels.native.chain import Chain, HeadShape, RowFunctions, empty_heads, set_heads
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import Products, pack, set_input, set_output
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(AVX2, LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.skipif(not PATHS, reason="no C extension with vector instructions")


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def functions(request: pytest.FixtureRequest) -> RowFunctions:
    return RowFunctions(request.param)


def run(*steps: object) -> None:
    assert isinstance(LIBRARY, NativeLibrary)
    Chain(LIBRARY, ("norms and RoPE", steps)).run()


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 64), (33, 72), (5, 768)])
def test_norm_equals_torch(
    functions: RowFunctions, dtype: torch.dtype, rows: int, width: int
) -> None:
    x, weight = seeded(rows, width + 16)[:, :width] * 3, seeded(width)
    out = torch.empty(rows, width, dtype=dtype)
    run(functions.norm(x, weight, 1e-3, out))
    expected = F.rms_norm(x, (width,), weight, eps=1e-3)
    torch.testing.assert_close(out.float(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@every_pair(dtype=ROUNDING, dims=[(16, 16), (48, 16), (64, 64), (96, 48)], normed=[False, True])
def test_heads_are_split_normed_and_rotated(
    functions: RowFunctions, dtype: torch.dtype, dims: tuple[int, ...], normed: bool
) -> None:
    head_dim, rotary_dim = dims
    rows, heads = 7, (4, 2, 2)
    x = seeded(rows, 16 * head_dim)
    norms = (seeded(head_dim), seeded(head_dim) + 1) if normed else None
    columns = (8 * head_dim, 0, 4 * head_dim)
    shape = HeadShape(columns, heads, head_dim, rotary_dim, norms, eps=1e-3)
    angles = seeded(rows, rotary_dim // 2).repeat(1, 2)
    cosine, sine = angles.cos(), angles.sin()
    args = functions.heads(x, shape, dtype)
    args.cosine, args.sine = cosine.data_ptr(), sine.data_ptr()
    found = empty_heads(rows, shape, dtype)
    set_heads(args, found)
    run(args)
    for number, part in enumerate(found):
        start = columns[number]
        expected = x[:, start : start + heads[number] * head_dim].view(rows, -1, head_dim)
        if number < 2:
            if norms is not None:
                expected = F.rms_norm(expected, (head_dim,), norms[number], eps=1e-3)
            expected = rotated(expected, cosine, sine)
        torch.testing.assert_close(
            part.float(), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype]
        )


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_are_converted_to_and_from_float32(
    functions: RowFunctions, dtype: torch.dtype
) -> None:
    x, narrow, wide = seeded(5, 72), torch.empty(5, 72, dtype=dtype), torch.empty(5, 72)
    run(functions.convert(x, narrow), functions.convert(narrow, wide))
    assert torch.equal(narrow, x.to(dtype))
    assert torch.equal(wide, narrow.float())


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE as in Transformers (`apply_rotary_pos_emb`); elements beyond are unchanged."""
    width = cosine.shape[1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    other = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cosine[:, None] + other * sine[:, None], rest], dim=-1)


def test_a_chain_makes_its_calls_in_order() -> None:
    assert isinstance(LIBRARY, NativeLibrary)
    products, functions = Products(LIBRARY), RowFunctions(LIBRARY.path)
    weight, gain = seeded(64, 128), seeded(128)
    stream, normed, out = seeded(9, 128), torch.empty(9, 128), torch.zeros(9, 64)
    packed = pack(weight, "float32")
    product = products.linear_args(packed)
    set_input(product, normed)
    set_output(product, out)
    norm = functions.norm(stream, gain, 1e-5, normed)
    chain = Chain(LIBRARY, ("norms and RoPE", [norm]), ("head", [product]))
    for rows in (4, 9):
        chain.set_rows(rows)
        chain.run()
        expected = F.rms_norm(stream[:rows], (128,), gain, eps=1e-5) @ weight.T
        torch.testing.assert_close(out[:rows], expected, rtol=1e-4, atol=1e-4)
        assert rows == 9 or (out[rows:] == 0).all()
