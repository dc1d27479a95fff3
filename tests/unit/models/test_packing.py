"""Linear layers on packed weights multiply as plain ones; embeddings share a tied head's weight."""

import time
import weakref

import pytest
import torch
from torch import Tensor, nn

from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import Products, has_products
from quire.models import native_linear, packing
from quire.models.native_linear import (
    PackedEmbedding,
    PackedLinear,
    fastest_products,
    pack_linear,
)
from quire.models.packing import pack_linears
from quire.models.weights import weight_bytes
from support.pairwise import every_pair
from support.zoo import tiny_llama

LIBRARY = load_library()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded) or not has_products(LIBRARY),
    reason="no C extension with vector instructions",
)


@pytest.fixture
def products() -> Products:
    assert not isinstance(LIBRARY, NotLoaded)
    return Products(LIBRARY)


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def exact_product(linear: nn.Linear, inputs: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return nn.functional.linear(inputs.double(), linear.weight.double(), bias)


@every_pair(dtype=DTYPES, bias=[False, True], rows=[1, 7, 33, 300])
def test_packed_layer_rounds_the_exact_product_once(products, rows, bias, dtype):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias, dtype=dtype)
    inputs = torch.randn(2, rows, 96).to(dtype)

    with torch.inference_mode():
        out = pack_linear(linear, products)(inputs)
        exact = exact_product(linear, inputs)

    assert out.shape == (2, rows, 80)
    assert out.dtype == dtype
    most = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=most, atol=2e-5)


def test_packed_layer_reads_transposed_inputs_of_one_sequence(products):
    """A reshape of one sequence does not copy, so its rows may be strided."""
    linear = nn.Linear(96, 80)
    inputs = torch.randn(1, 96, 5).transpose(1, 2)

    with torch.inference_mode():
        strided, contiguous = (pack_linear(linear, products)(x) for x in (inputs, inputs.clone()))
        expected = pack_linear(linear, products)(inputs.contiguous())

    assert torch.equal(strided, expected)
    assert torch.equal(contiguous, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_layer_exposes_its_plain_weight(products, dtype):
    linear = nn.Linear(96, 80, dtype=dtype)
    packed = pack_linear(linear, products)

    assert torch.equal(packed.weight.to(dtype), linear.weight)
    assert (packed.in_features, packed.out_features) == (96, 80)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_layer_multiplies_no_rows(products, dtype):
    packed = pack_linear(nn.Linear(96, 80, dtype=dtype), products)

    assert packed(torch.empty(0, 96, dtype=dtype)).shape == (0, 80)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_model_has_close_logits(products, tied):
    plain, packed = tiny_llama(tied=tied), tiny_llama(tied=tied)
    pack_linears(packed, products)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(packed(ids).logits, plain(ids).logits, atol=0.02, rtol=0.02)
    assert len(packed_names(packed)) == 2 * 7 + 1
    assert packed.dtype == plain.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True])
def test_packed_model_counts_whole_panels_and_float32_biases_once(products, tied):
    plain, packed = tiny_llama(tied=tied), tiny_llama(tied=tied)
    pack_linears(packed, products)
    layers = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    columns_added = {80: 48, 32: 32, 96: 32}  # to a multiple of 64
    added = sum(columns_added.get(m.out_features, 0) * m.in_features * 2 for m in layers)
    widened = sum((4 * -(-outer // 64) * 64) - 2 * outer for outer in (64, 32, 32, 64)) * 2

    assert weight_bytes(packed) == weight_bytes(plain) + added + widened


def test_plain_weight_is_freed_before_the_next_layer_is_packed(products, monkeypatch):
    model = nn.Sequential(*(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive = []
    original = packing.pack_linear

    def counting(linear, products, codec):
        alive.append(sum(weight() is not None for weight in weights))
        return original(linear, products, codec)

    monkeypatch.setattr(packing, "pack_linear", counting)
    pack_linears(model, products)

    assert alive == [4, 3, 2, 1]
    assert all(weight() is None for weight in weights)


def test_embedding_reads_the_packed_weight_of_a_tied_head(products):
    plain, model = tiny_llama(tied=True), tiny_llama(tied=True)
    weight = weakref.ref(model.lm_head.weight)
    pack_linears(model, products)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()

    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed is head.packed
    assert weight() is None
    ids = torch.tensor([[3, 0, 95], [7, 7, 64]])
    assert torch.equal(embedding(ids), plain.get_input_embeddings()(ids))
    assert torch.equal(embedding.weight, plain.get_input_embeddings().weight)


def test_other_shared_weights_are_not_packed(products):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    limited = nn.Embedding(32, 32, max_norm=1.0)
    tied_to_limited = nn.Linear(32, 32)
    tied_to_limited.weight = limited.weight
    model = nn.Sequential(first, second, limited, tied_to_limited, nn.Linear(32, 32))
    pack_linears(model, products)

    assert packed_names(model) == {"4"}
    assert type(model[2]) is nn.Embedding


def test_derived_and_hooked_layers_and_other_types_are_not_packed(products):
    class Derived(nn.Linear):
        pass

    hooked, before = nn.Linear(32, 32), nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *_: None)
    before.register_forward_pre_hook(lambda *_: None)
    double, odd = nn.Linear(32, 32, dtype=torch.float64), nn.Linear(31, 32, dtype=torch.bfloat16)
    model = nn.Sequential(hooked, before, Derived(32, 32), double, odd, nn.Linear(31, 32))
    pack_linears(model, products)

    assert packed_names(model) == {"5"}


def test_layers_of_modules_left_alone_are_not_packed(products):
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    pack_linears(model, products, left_alone=[model[0]])

    assert packed_names(model) == {"1"}


def test_shared_layer_is_packed_once(products):
    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    pack_linears(model, products)

    assert model[0][0] is model[1][0]
    assert isinstance(model[0][0], PackedLinear)


@pytest.mark.parametrize(("linear_sleeps_s", "is_ours"), [(0.05, True), (0.0, False)])
def test_one_dnn_computes_products_where_it_is_faster_with_amx(
    monkeypatch, linear_sleeps_s, is_ours
):
    """A stand-in for oneDNN takes long, or no time at all."""
    monkeypatch.setattr(native_linear, "has_amx", lambda: True)
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, weight: time.sleep(linear_sleeps_s)
    )

    assert (fastest_products.__wrapped__() is not None) == is_ours
