"""Products with packed weights against torch, on every code path of this CPU."""

import pytest
import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.native.arguments import (
    ADD,
    AVX2,
    GATE_SILU,
    GROUP_CODES,
    PANEL_COLUMNS,
)
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import (
    CODED,
    KINDS,
    CodedRows,
    PackedWeight,
    Products,
    can_pack,
    pack,
    pack_gated,
    pack_parts,
)
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(AVX2, LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(not PATHS, reason="no C extension with vector instructions")


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def products(request: pytest.FixtureRequest) -> Products:
    assert isinstance(LIBRARY, NativeLibrary)
    return Products(LIBRARY, request.param)


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def expected_product(products: Products, x: Tensor, weight: PackedWeight) -> Tensor:
    """The product of the activations that the kernel reads and the decoded weight, float64."""
    if weight.kind in CODED:
        x = decoded(products.code_rows(x))
    return x.double() @ weight.unpacked().double().T


def decoded(rows: CodedRows) -> Tensor:
    scales = rows.scales.repeat_interleave(GROUP_CODES, dim=1)[:, : rows.codes.shape[1]]
    return rows.codes.float() * scales


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@every_pair(
    kind=KINDS,
    rows=[1, 2, 3, 4, 5, 6, 7, 16, 31, 121, 250],
    shape=[(64, 128), (100, 208), (640, 1040)],
)
def test_product_equals_torch(
    products: Products, kind: str, rows: int, shape: tuple[int, ...]
) -> None:
    outer, inner = shape
    weight = pack(seeded(outer, inner), kind)
    x = seeded(rows, inner).to(products.activation_dtype(weight, torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((rows, outer + 3), 7.0, dtype=dtype)
        products.prepare(weight).run(x, out[:, :outer])
        assert error(out[:, :outer], expected_product(products, x, weight)) < TOLERANCE[dtype]
        assert (out[:, outer:] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_independent_of_the_other_rows(products: Products, kind: str) -> None:
    weight = pack(seeded(192, 512), kind)
    x = seeded(130, 512).to(products.activation_dtype(weight, torch.float32))
    alone, together = torch.empty(130, 192), torch.empty(130, 192)
    products.prepare(weight).run(x, together)
    for row in range(130):
        products.prepare(weight).run(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(alone, together)


@every_pair(threads=[1, 2], kind=KINDS, shape=[(192, 512), (100, 208), (2_080, 688)])
def test_a_row_is_independent_of_the_number_of_rows(
    products: Products, shape: tuple[int, ...], kind: str, threads: int
) -> None:
    outer, inner = shape
    product = products.prepare(pack(seeded(outer, inner), kind))
    x = seeded(200, inner).to(products.activation_dtype(product.weight, torch.float32))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outs = {rows: torch.empty(rows, outer) for rows in (1, 5, 33, 200)}
        for rows, out in outs.items():
            product.run(x[200 - rows :], out)
    finally:
        torch.set_num_threads(before)
    for rows, out in outs.items():
        assert torch.equal(out, outs[200][200 - rows :])


@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_addition(products: Products, kind: str) -> None:
    weight, bias = pack(seeded(100, 256), kind), torch.zeros(2 * PANEL_COLUMNS)
    bias[:100] = seeded(100)
    x = seeded(5, 256).to(products.activation_dtype(weight, torch.float32))
    out = seeded(5, 100)
    expected = out.double() + expected_product(products, x, weight) + bias[:100].double()
    products.prepare(weight, bias=bias, finish=ADD).run(x, out)
    assert error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [32, 80, 688])
def test_gated_product_equals_torch(products: Products, kind: str, half: int) -> None:
    gate, other = seeded(half, 256) * 3, seeded(half, 256) + 1
    weight = pack_gated(gate, other, kind)
    x = seeded(7, 256).to(products.activation_dtype(weight, torch.float32))
    out = torch.empty(7, half)
    products.prepare(weight, finish=GATE_SILU).run(x, out)
    both = expected_product(products, x, weight)
    expected = torch.nn.functional.silu(both[:, :half]) * both[:, half:]
    assert error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_joint_weight(products: Products, kind: str) -> None:
    weights = [seeded(100, 256), seeded(32, 256), seeded(64, 256) + 1]
    joint, starts = pack_parts(weights, kind)
    assert starts == (0, 128, 192)
    x = seeded(3, 256).to(products.activation_dtype(joint, torch.float32))
    for start, weight in zip(starts, weights, strict=True):
        part, alone = joint.part(start, len(weight)), pack(weight, kind)
        assert torch.equal(part.unpacked(), alone.unpacked())
        found, expected = torch.empty(3, len(weight)), torch.empty(3, len(weight))
        products.prepare(part).run(x, found)
        products.prepare(alone).run(x, expected)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "max_error"), [("int8", 0.01), ("int4", 0.16)])
def test_codes_are_near_the_weight(kind: str, max_error: float) -> None:
    weight = seeded(70, 272)
    found = pack(weight, kind).unpacked()
    assert found.shape == weight.shape
    assert float((found - weight).norm() / weight.norm()) < max_error


@every_pair(
    threads=[1, 2, 3],
    kind=KINDS,
    shape=[(33, 100, 208), (67, 64, 2_064), (250, 160, 128), (50, 70, 5_632), (40, 64, 28_672)],
)
def test_many_rows_equal_rows_alone(
    products: Products, kind: str, shape: tuple[int, ...], threads: int
) -> None:
    rows, outer, inner = shape
    weight, bias = pack(seeded(outer, inner), kind), torch.zeros(-(-outer // 64) * 64)
    bias[:outer] = seeded(outer)
    x = seeded(rows, inner).to(products.activation_dtype(weight, torch.float32))
    product = products.prepare(weight, bias=bias, finish=ADD)
    alone = seeded(rows, outer)
    together = alone.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product.run(x, together)
    finally:
        torch.set_num_threads(before)
    for row in range(rows):
        product.run(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [32, 80, 688])
def test_gated_product_of_many_rows_equals_that_of_a_row(
    products: Products, kind: str, half: int
) -> None:
    weight = pack_gated(seeded(half, 256) * 3, seeded(half, 256) + 1, kind)
    x = seeded(100, 256).to(products.activation_dtype(weight, torch.float32))
    product = products.prepare(weight, finish=GATE_SILU)
    alone, together = torch.empty(100, half), torch.empty(100, half)
    product.run(x, together)
    for row in range(100):
        product.run(x[row : row + 1], alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_unpacked_weight_is_the_weight(kind: str) -> None:
    weight = seeded(70, 272).to(torch.float32 if kind == "float32" else torch.bfloat16)
    assert torch.equal(pack(weight, kind).unpacked(), weight)
    part = torch.cat([weight.new_zeros(1), weight.flatten()])[1:].view(70, 272)  # at an odd offset
    assert torch.equal(pack(part, kind).unpacked(), weight)


def test_activation_codes_round_to_nearest(products: Products) -> None:
    x = seeded(4, 272)
    coded = products.code_rows(x)
    groups = torch.nn.functional.pad(x, (0, 112)).view(4, 3, GROUP_CODES)
    assert torch.allclose(coded.scales, groups.abs().amax(dim=2) / 127)
    assert (decoded(coded) - x).abs().max() <= coded.scales.max() * 0.501
    sums = torch.nn.functional.pad(coded.codes.int(), (0, 112)).view(4, 3, GROUP_CODES).sum(2)
    assert torch.equal(coded.sums, sums.int())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_whose_activations_cannot_be_quantized_in_whole_vectors_are_refused(
    kind: str,
) -> None:
    assert can_pack(352, kind)
    assert not can_pack(344, kind)  # 16 activations are quantized at a time

    with pytest.raises(InvariantError, match="multiple of 16, got 344"):
        pack(seeded(64, 344), kind)
