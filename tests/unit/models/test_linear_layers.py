"""Linear layers in other forms (packed, reordered, widened) and activations row by row."""

import logging
import time
import weakref

import psutil
import pytest
import torch
from torch import nn

from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import Products, has_products
from quire.models import linear_weights, native_linear, packing
from quire.models.adapter import (
    ONE_THREAD_NUMBERS,
    RowwiseActivation,
    TransformersDecoder,
    make_activations_rowwise,
    rows_depend,
)
from quire.models.linear_weights import (
    ReorderedLinear,
    WidenedLinear,
    can_reorder,
    reorder_linears,
    widen_linears,
)
from quire.models.native_linear import PackedEmbedding, PackedLinear, fastest_products, pack_linear
from quire.models.own_attention import latent_heads
from quire.models.packing import pack_linears
from quire.models.weights import weight_bytes
from support import zoo
from support.pairwise import every_pair
from support.zoo import tiny_llama

LIBRARY = load_library()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {"packed": PackedLinear, "reordered": ReorderedLinear, "widened": WidenedLinear}
FORMS = pytest.mark.parametrize("form", KINDS)
TIED = pytest.mark.parametrize("tied", [False, True])


@pytest.fixture
def products():
    if isinstance(LIBRARY, NotLoaded) or not has_products(LIBRARY):
        pytest.skip("no C extension with vector instructions")
    return Products(LIBRARY)


@pytest.fixture
def convert(form, request, monkeypatch):
    """Bring the linear layers of a model into the form; returns those that have it, by name."""
    if form == "packed":
        products = request.getfixturevalue("products")
    elif form == "reordered" and not can_reorder():
        pytest.skip("this torch or CPU reorders no bfloat16 weights")
    elif form == "widened":  # a CPU without half-precision products
        monkeypatch.setattr(linear_weights, "multiplies", lambda dtype: dtype == torch.float32)

    def run(model):
        if form == "packed":
            pack_linears(model, products)
        else:
            (reorder_linears if form == "reordered" else widen_linears)(model)
        return {name: one for name, one in model.named_modules() if isinstance(one, KINDS[form])}

    return run


@every_pair(form=["packed", "widened"], dtype=DTYPES, bias=[False, True], rows=[1, 7, 33, 300])
def test_layer_rounds_the_exact_product_once(convert, form, rows, bias, dtype):
    torch.manual_seed(rows)
    model = nn.Sequential(linear := nn.Linear(96, 80, bias=bias, dtype=dtype))
    inputs = torch.randn(2, rows, 96).to(dtype)
    exact = nn.functional.linear(
        inputs.double(), linear.weight.double(), linear.bias.double() if bias else None
    )
    assert bool(convert(model)) == (form == "packed" or dtype != torch.float32)

    with torch.inference_mode():
        out = model(inputs)

    assert out.dtype == dtype
    most = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(out.double(), exact, rtol=most, atol=2e-5)


@pytest.mark.skipif(not can_reorder(), reason="this torch or CPU reorders no bfloat16 weights")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33, 300])
def test_reordered_layer_is_bitwise_equal_to_the_plain_layer(rows, bias):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    inputs = torch.randn(2, rows, 96).bfloat16()
    with torch.inference_mode():
        assert torch.equal(ReorderedLinear(linear)(inputs), linear(inputs))


def test_packed_layer_reads_transposed_inputs_of_one_sequence(products):
    """A reshape of one sequence does not copy, so its rows may be strided."""
    linear = nn.Linear(96, 80)
    inputs = torch.randn(1, 96, 5).transpose(1, 2)

    with torch.inference_mode():
        strided, contiguous = (pack_linear(linear, products)(x) for x in (inputs, inputs.clone()))
        expected = pack_linear(linear, products)(inputs.contiguous())

    assert torch.equal(strided, expected)
    assert torch.equal(contiguous, expected)


@pytest.mark.parametrize(
    ("form", "dtype"), [*(("packed", dtype) for dtype in DTYPES), ("reordered", torch.bfloat16)]
)
def test_layer_exposes_its_plain_weight_and_multiplies_no_rows(convert, dtype):
    model = nn.Sequential(linear := nn.Linear(96, 80, dtype=dtype))
    convert(model)
    assert torch.equal(model[0].weight.to(dtype), linear.weight)
    assert (model[0].in_features, model[0].out_features) == (96, 80)
    assert model(torch.empty(0, 96, dtype=dtype)).shape == (0, 80)


@FORMS
@TIED
def test_model_has_close_logits_and_counts_its_weight_bytes(convert, form, tied):
    plain, model = tiny_llama(tied=tied), tiny_llama(tied=tied)
    layers = list((found := convert(model)).values())
    tolerance = 0 if form == "reordered" else 0.02
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            model(ids).logits, plain(ids).logits, atol=tolerance, rtol=tolerance
        )

    if form == "packed":  # whole panels, and biases in float32
        columns_added = {80: 48, 32: 32, 96: 32}  # to a multiple of 64
        added = sum(columns_added.get(m.out_features, 0) * m.in_features * 2 for m in layers)
        added += sum((4 * -(-outer // 64) * 64) - 2 * outer for outer in (64, 32, 32, 64)) * 2
    elif form == "widened":
        biases = [m.bias.numel() for m in layers if m.bias is not None]
        added = 2 * (sum(m.weight.numel() for m in layers[:-1]) + sum(biases))
        added += layers[-1].weight.numel() * (4 if tied else 2)  # the embedding is not widened
    else:
        added = 0
    assert len(layers) == 2 * 7 + ("lm_head" in found)
    assert ("lm_head" in found) == (form != "reordered" or not tied)
    assert model.dtype == plain.dtype == torch.bfloat16
    assert weight_bytes(model) == weight_bytes(plain) + added


@pytest.mark.parametrize(
    ("form", "owner", "name"),
    [("packed", packing, "pack_linear"), ("reordered", ReorderedLinear, "__init__")],
)
def test_plain_weight_is_freed_before_the_next_layer_is_converted(
    convert, owner, name, monkeypatch
):
    model = nn.Sequential(*(nn.Linear(32, 32, dtype=torch.bfloat16) for _ in range(4)))
    weights = [weakref.ref(layer.weight) for layer in model]
    alive, original = [], getattr(owner, name)

    def counting(*args):
        alive.append(sum(weight() is not None for weight in weights))
        return original(*args)

    monkeypatch.setattr(owner, name, counting)
    convert(model)

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


@FORMS
def test_derived_and_hooked_layers_and_other_types_are_not_converted(convert, form):
    def linear(kind=nn.Linear, inner=32, dtype=torch.bfloat16):
        return kind(inner, 32, dtype=dtype)

    hooked, before = linear(), linear()
    hooked.register_forward_hook(lambda *_: None)
    before.register_forward_pre_hook(lambda *_: None)
    derived = linear(type("Derived", (nn.Linear,), {}))
    others = [linear(dtype=torch.float64), linear(inner=31)]
    if form != "packed":
        others = [linear(dtype=torch.float32)]
    plain = [linear(), linear(inner=31, dtype=torch.float32)][: 1 + (form == "packed")]

    found = convert(nn.Sequential(*plain, hooked, before, derived, *others))

    assert list(found) == ["0", "1"][: len(plain)]


@pytest.mark.parametrize("form", ["packed"])
def test_other_shared_weights_are_not_packed(convert):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    limited = nn.Embedding(32, 32, max_norm=1.0)
    tied_to_limited = nn.Linear(32, 32)
    tied_to_limited.weight = limited.weight
    model = nn.Sequential(first, second, limited, tied_to_limited, nn.Linear(32, 32))

    assert list(convert(model)) == ["4"]
    assert type(model[2]) is nn.Embedding


def test_layers_of_modules_left_alone_are_not_packed(products):
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    pack_linears(model, products, left_alone=[model[0]])
    assert [isinstance(one, PackedLinear) for one in (model[0][0], model[1])] == [False, True]


@FORMS
def test_shared_layer_is_converted_once(convert):
    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    assert list(convert(model)) == ["0.0"]
    assert model[0][0] is model[1][0]


@pytest.mark.parametrize("form", ["widened"])
def test_layers_that_share_a_weight_share_the_widened_weight(convert):
    first, second = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.bfloat16)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert list(convert(model)) == ["0", "1"]
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize("form", ["widened"])
def test_queries_are_folded_by_widened_projections_of_latents(convert):
    model = zoo.build("deepseek_v2", dtype=torch.bfloat16)
    heads = latent_heads(model)[0]
    query, out = torch.randn(3, 4, 20).bfloat16(), torch.randn(3, 4, 16).bfloat16()
    plain = heads.fold(query), heads.unfold(out)

    assert "model.layers.0.self_attn.kv_b_proj" in convert(model)
    for found, expected in zip((heads.fold(query), heads.unfold(out)), plain, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", ["widened"])
def test_layers_are_not_widened_without_memory_and_a_warning_is_logged(
    convert, monkeypatch, caplog
):
    short = psutil.virtual_memory()._replace(available=100)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: short)
    with caplog.at_level(logging.WARNING):
        assert not convert(nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16)))
    assert "ten times as long" in caplog.text


@pytest.mark.parametrize(("linear_sleeps_s", "is_ours"), [(0.05, True), (0.0, False)])
def test_one_dnn_computes_products_where_it_is_faster_with_amx(
    products, monkeypatch, linear_sleeps_s, is_ours
):
    """A stand-in for oneDNN takes long, or no time at all."""
    monkeypatch.setattr(native_linear, "has_amx", lambda: True)
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight: time.sleep(linear_sleeps_s))
    assert (fastest_products.__wrapped__() is not None) == is_ours


class RecordingActivation(nn.Module):
    """An activation that records the shapes of its inputs."""

    def forward(self, values):
        self.shapes = [*getattr(self, "shapes", []), tuple(values.shape)]
        return values.exp()


@pytest.mark.parametrize(
    ("width", "chunk_rows"), [(48, 1), (64, 256), (2816, 5), (ONE_THREAD_NUMBERS, 1), (50_000, 1)]
)
def test_rows_are_chunked_to_the_size_one_thread_computes(width, chunk_rows):
    recording, values = RecordingActivation(), torch.randn(1, 24, width)
    found = RowwiseActivation(recording)(values)
    assert found.shape == values.shape
    assert torch.allclose(found, values.exp())
    assert recording.shapes[0] == (min(24, chunk_rows), width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [48, 700, 2816])
def test_row_is_bitwise_equal_at_any_index_and_thread_count(width, dtype):
    values = (3 * torch.randn(1, 32, width)).to(dtype)
    before = torch.get_num_threads()
    for activation in (nn.SiLU(), nn.GELU(approximate="tanh")):
        rowwise = RowwiseActivation(activation)
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                expected = rowwise(values)
                for _ in range(3):
                    order = torch.randperm(32)
                    assert torch.equal(rowwise(values[:, order]), expected[:, order])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "phi3", "opt", "gpt_neox"])
def test_every_activation_of_a_model_is_wrapped_once(architecture):
    model = zoo.build(architecture)
    make_activations_rowwise(model)
    make_activations_rowwise(model)

    wrapped = [module for module in model.modules() if isinstance(module, RowwiseActivation)]
    assert wrapped
    assert not any(isinstance(module.activation, RowwiseActivation) for module in wrapped)


def test_model_that_depends_on_the_row_index_is_detected():
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)
    assert decoder.prepare_fixed_shapes(32) is None

    def shifted(module, arguments, out):
        return out + 1e-3 * torch.arange(out.shape[1])[:, None]  # depends on the row index

    model.model.norm.register_forward_hook(shifted)

    assert "the logits of a token depend on its index among the 32 rows" in rows_depend(decoder, 32)
