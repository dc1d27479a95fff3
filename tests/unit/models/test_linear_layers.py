"""Linear layers in other forms, activations row by row; weight codecs and checkpoints."""

import json
import logging
import re
import time
import weakref
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.errors import ConfigError, ModelError, UnknownName, UnsupportedModel
from quire.kernels.native.library import NotLoaded, load_library
from quire.kernels.native.linear import Products, has_products, pack
from quire.models import checkpoint, linear_weights, loader, native_linear, packing
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
from quire.models.loader import load_model
from quire.models.native.decoder import NativeDecoder
from quire.models.native_linear import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    available_products,
    fastest_products,
    matrix,
    pack_linear,
)
from quire.models.own_attention import latent_heads, read_projections
from quire.models.packing import codec_refusal, head_codec, output_head, pack_linears
from quire.models.weights import weight_bytes
from quire.offload.weights.placement import place_beyond
from support import zoo
from support.flat import distance, flat_logits, plain_logits, sequences
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
def test_shared_layers_are_converted_once_and_derived_ones_not(convert, form):
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

    shared = nn.Linear(32, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    assert list(convert(model)) == ["0.0"]
    assert model[0][0] is model[1][0]


@pytest.mark.parametrize("form", ["packed"])
def test_other_shared_weights_and_modules_left_alone_are_not_packed(convert, products):
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    limited = nn.Embedding(32, 32, max_norm=1.0)
    tied_to_limited = nn.Linear(32, 32)
    tied_to_limited.weight = limited.weight
    model = nn.Sequential(first, second, limited, tied_to_limited, nn.Linear(32, 32))
    assert list(convert(model)) == ["4"]
    assert type(model[2]) is nn.Embedding

    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 32))
    pack_linears(model, products, left_alone=[model[0]])
    assert [isinstance(one, PackedLinear) for one in (model[0][0], model[1])] == [False, True]


@pytest.mark.parametrize("form", ["widened"])
def test_widened_weights_are_shared_fold_queries_of_latents_and_need_memory(
    convert, monkeypatch, caplog
):
    first, second = nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8, dtype=torch.bfloat16)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert list(convert(model)) == ["0", "1"]
    assert model[0].weight is model[1].weight

    model = zoo.build("deepseek_v2", dtype=torch.bfloat16)
    heads = latent_heads(model)[0]
    query, out = torch.randn(3, 4, 20).bfloat16(), torch.randn(3, 4, 16).bfloat16()
    plain = heads.fold(query), heads.unfold(out)
    assert "model.layers.0.self_attn.kv_b_proj" in convert(model)
    for found, expected in zip((heads.fold(query), heads.unfold(out)), plain, strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected)

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


# ---- gpu -----------------------------------------------------------------------------------------


CODECS = ("int8", "int4")
MODEL_ERROR = 0.25  # int8 activations of all layers; they change the experts of some tokens
LAYER_ERROR = 0.03

needs_products = pytest.mark.skipif(
    available_products() is None, reason="no C extension with vector instructions"
)


def decode_weights(model: PreTrainedModel, codec: str) -> PreTrainedModel:
    head, kept = output_head(model), read_projections(model)
    for module in list(model.modules()):
        if module in kept:
            continue
        if type(module) in (nn.Linear, Conv1D):
            kind = head_codec(codec) if module is head else codec
            matrix(module).copy_(pack(matrix(module), kind).unpacked())
        elif hasattr(module, "has_gate"):
            for name in ("gate_up_proj", "down_proj"):
                for weight in getattr(module, name).detach():
                    one = weight.mT if module.is_transposed else weight
                    one.copy_(pack(one, codec).unpacked())
    return model


def plain_weight_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.ndim > 1}


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@needs_products
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", [name for name in zoo.ARCHITECTURES if name != "gemma3n"])
def test_every_architecture_computes_with_the_decoded_weights(name: str, codec: str) -> None:
    prompts = sequences(21, 1, 13, vocab_size=zoo.VOCAB_SIZE)
    decoded = decode_weights(zoo.build(name), codec)
    decoder = TransformersDecoder(zoo.build(name), codec=codec)

    found = flat_logits(decoder, prompts, chunk_tokens=[6, 1, 64])

    for actual, expected in zip(found, plain_logits(decoded, *prompts), strict=True):
        assert distance(actual, expected) < MODEL_ERROR
    left = {one for one in plain_weight_names(decoder.model) if "router" not in one}
    kept = ("embed", "wte", "wpe", ".gate.", "feed_forward.experts.", ".kv_b_proj.")
    assert all(any(part in one for part in kept) for one in left)


@needs_products
@every_pair(
    codec=CODECS, impl=["auto", "native", "transformers"], name=["qwen3", "gpt2", "mixtral"]
)
def test_codec_is_loaded_with_each_implementation(name, impl, codec, tmp_path):
    if impl == "native" and name != "qwen3":
        pytest.skip("no fused layers")
    folder = zoo.save(name, tmp_path)
    loaded = load_model(folder, device="cpu", model_impl=impl, weight_codec=codec)

    linears = [m for m in loaded.decoder.model.modules() if isinstance(m, PackedLinear)]
    head = output_head(loaded.decoder.model)
    assert {m.packed.kind for m in linears if m is not head} == {codec}
    assert isinstance(head, PackedLinear)
    assert head.packed.kind == head_codec(codec)
    assert isinstance(loaded.decoder, NativeDecoder) == (name == "qwen3" and impl != "transformers")
    (prompt,) = sequences(9, vocab_size=zoo.VOCAB_SIZE)
    (found,) = flat_logits(loaded.decoder, [prompt], chunk_tokens=[4])
    (expected,) = plain_logits(decode_weights(zoo.build(name), codec), prompt)
    assert distance(found, expected) < MODEL_ERROR


@needs_products
def test_decoded_weights_are_those_of_tied_embeddings_and_can_be_coded_again(tmp_path):
    model = TransformersDecoder(zoo.build("llama_mqa"), codec="int8").model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert embedding.packed is head.packed
    assert torch.equal(embedding(torch.arange(5)), head.weight[:5])

    write_checkpoint(tmp_path, "llama", FORMATS[0])
    plain = load_model(tmp_path, device="cpu", dtype="bfloat16")
    coded = load_model(tmp_path, device="cpu", dtype="bfloat16", weight_codec="int8")
    assert load_model(tmp_path, device="cpu").decoder.dtype == torch.float32
    assert plain.decoder.dtype == torch.bfloat16
    assert coded.weight_bytes < plain.weight_bytes


@needs_products
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_packed_experts_equal_experts_with_the_decoded_weights(name: str, codec: str) -> None:
    models = (
        decode_weights(zoo.build(name), codec),
        TransformersDecoder(zoo.build(name), codec=codec).model,
    )
    plain, packed = (model.model.layers[1].mlp.experts for model in models)
    rows, weights = torch.randn(17, 32), torch.rand(17, 2)
    experts = torch.stack([torch.randperm(4)[:2] for _ in range(17)])
    with torch.inference_mode():
        found, expected = packed(rows, experts, weights), plain(rows, experts, weights)

    assert isinstance(packed, PackedExperts)
    assert distance(found, expected) < LAYER_ERROR
    assert packed(rows[:0], experts[:0], weights[:0]).shape == (0, 32)


@pytest.fixture
def no_weights_read(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=AssertionError("weights were read"))
    monkeypatch.setattr(checkpoint, "read_model", fail)
    monkeypatch.setattr(checkpoint, "read_coded_model", fail)


def _save_llama(folder: Path, **fields: object) -> Path:
    fields = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1} | fields
    config = LlamaConfig(**fields, intermediate_size=16, num_key_value_heads=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@needs_products
def test_input_size_that_fills_no_unit_is_refused_before_weights_are_read(
    tmp_path: Path, no_weights_read: None
) -> None:
    folder = _save_llama(tmp_path / "24", hidden_size=24, head_dim=24)

    for codec in ("int4", "int8"):
        with pytest.raises(ConfigError, match=rf"q_proj has 24 inputs, and {codec} .* of 16"):
            load_model(folder, device="cpu", weight_codec=codec)
    folder = _save_llama(tmp_path / "48", hidden_size=48, head_dim=48)
    with pytest.raises(AssertionError, match="weights were read"):
        load_model(folder, device="cpu", weight_codec="int8")


def test_offloaded_weights_other_devices_and_unknown_names_are_refused(
    tmp_path, monkeypatch, no_weights_read
):
    zoo.save("llama", tmp_path)
    int8 = {"device": "cpu", "weight_codec": "int8"}

    with pytest.raises(ConfigError, match=r"weight_codec=int8 .*offloaded.*weights-memory all"):
        load_model(tmp_path, **int8, placer=place_beyond("1MiB"))
    with pytest.raises(ConfigError, match=r"weight_codec=int4 .* not on cuda"):
        loader.check_choices("auto", "int4", torch.device("cuda"), offloaded=False)
    with pytest.raises(UnknownName, match="weight_codec"):
        load_model(tmp_path, device="cpu", weight_codec="int5")
    with pytest.raises(UnknownName, match="model_impl"):
        load_model(tmp_path, device="cpu", model_impl="fused")
    monkeypatch.setattr(loader, "load_library", lambda: NotLoaded("no C compiler"))
    with pytest.raises(ConfigError, match=r"weight_codec=int8 is not possible: no C compiler"):
        load_model(tmp_path, **int8)


class _Derived(nn.Linear):
    pass


def _stacked() -> nn.Module:
    return nn.ParameterDict({"weights": torch.empty(2, 8, 8)})


def _shared() -> nn.Module:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(_Derived(8, 8)), "0 is a _Derived, not a plain linear layer"),
        (lambda: nn.Sequential(_stacked()), r"0 is a ParameterDict with stacked weights \(weights"),
        (lambda: nn.Sequential(nn.Linear(16, 16, dtype=torch.float64)), "weights of torch.float64"),
        (lambda: nn.Sequential(nn.Embedding(8, 8)), "no linear layers"),
        (_shared, "0 shares its weight"),
    ],
)
def test_layers_that_cannot_be_packed_are_named(make, reason: str) -> None:
    with torch.device("meta"):
        model = make()
    found = codec_refusal(model, "int8")
    assert found is not None
    assert re.search(reason, found)


GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [row, column] along columns into 32-bit words, code by code."""
    per_word = 32 // bits
    rows, columns = codes.shape
    words = torch.zeros(rows, columns // per_word, dtype=torch.int64)
    for word in range(columns // per_word):
        for slot in range(per_word):
            column = word * per_word + (slot if order is None else order[slot])
            words[:, word] |= codes[:, column] << (bits * slot)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def quantize(weight: Tensor, bits: int, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [inner, outer], zeros and scales [group, outer], and the decoded weight."""
    codes, decoded = torch.empty_like(weight.T, dtype=torch.int64), torch.empty_like(weight.T)
    num_groups, outer = int(groups.max()) + 1, len(weight)
    zeros, scales = torch.empty(num_groups, outer).long(), torch.empty(num_groups, outer)
    for group in range(num_groups):
        part = weight.T[groups == group]
        low, high = part.amin(0).clamp_max(0), part.amax(0).clamp_min(0)
        scale = ((high - low) / (2**bits - 1)).half()
        zero = (-low / scale).round().clamp(1, 2**bits - 1).long()
        code = (part / scale + zero).round().clamp(0, 2**bits - 1).long()
        codes[groups == group], zeros[group], scales[group] = code, zero, scale.float()
        decoded[groups == group] = (code - zero) * scale.float()
    return codes, zeros, scales.half(), decoded.T


def write_checkpoint(folder: Path, name: str, options: dict[str, object]) -> dict[str, Tensor]:
    """Save a tiny model with coded layers; returns the decoded weights by name."""
    zoo.save(name, folder)
    path, decoded = folder / "model.safetensors", {}
    stored = load_file(path)
    method, bits = options["quant_method"], int(options["bits"])
    for key, weight in list(stored.items()):
        if not key.endswith("_proj.weight"):
            continue
        groups = torch.arange(weight.shape[1]) // GROUP
        if options.get("desc_act"):
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        codes, zeros, scales, decoded[key] = quantize(weight, bits, groups)
        layer = key.removesuffix(".weight")
        if method == "gptq":
            minus = 0 if options.get("checkpoint_format") == "gptq_v2" else 1
            stored[f"{layer}.qweight"] = pack_words(codes.T, bits).T.contiguous()
            stored[f"{layer}.qzeros"] = pack_words(zeros - minus, bits)
            stored[f"{layer}.g_idx"] = groups.int()
        else:
            stored[f"{layer}.qweight"] = pack_words(codes, bits, AWQ_ORDER)
            stored[f"{layer}.qzeros"] = pack_words(zeros, bits, AWQ_ORDER)
        stored[f"{layer}.scales"] = scales
        del stored[key]
    save_file(stored, path, metadata={"format": "pt"})
    _edit(folder, quantization_config=options | {"group_size": GROUP})
    return decoded


FORMATS = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "gptq", "bits": 4, "desc_act": True},
    {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
    {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"},
]


@pytest.mark.parametrize(
    "options", FORMATS, ids=lambda options: "-".join(map(str, options.values()))
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_coded_layers_are_decoded(name: str, options: dict[str, object], tmp_path: Path) -> None:
    decoded = write_checkpoint(tmp_path, name, options)
    plain = zoo.build(name)
    plain.load_state_dict(decoded, strict=False)
    (prompt,) = sequences(11, vocab_size=zoo.VOCAB_SIZE)

    loaded = load_model(tmp_path, device="cpu", dtype="float32")

    found = flat_logits(loaded.decoder, [prompt], chunk_tokens=[4])
    assert len(decoded) == 2 * 7
    torch.testing.assert_close(found, plain_logits(plain, prompt), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, r"GPTQ weights with bits=3 .*--weight-codec"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format=marlin .*cannot be decoded"),
        ({"quant_method": "awq", "version": "gemv"}, r"version=gemv .*--weight-codec"),
    ],
)
def test_other_variants_are_refused(options, message, tmp_path, no_weights_read):
    write_checkpoint(tmp_path, "llama", FORMATS[0])
    _edit(tmp_path, quantization_config=FORMATS[0] | options)
    with pytest.raises(UnsupportedModel, match=message):
        load_model(tmp_path, device="cpu")


@needs_products
def test_other_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    _edit(zoo.save("llama", tmp_path), quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModel, match=r"quantized already \(fp8\); leave out the codec"):
        load_model(tmp_path, device="cpu", weight_codec="int4")

    _edit(tmp_path, quantization_config={"quant_method": "quark"})  # its package is not installed
    message = r"quantized \(quark\).*--weight-codec int8 .*a GPTQ check"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")


def test_a_missing_part_of_a_layer_and_codes_that_do_not_fit_are_refused(tmp_path, no_weights_read):
    write_checkpoint(tmp_path, "llama", FORMATS[0])
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    scales = {"model.layers.1.mlp.up_proj.scales": stored.pop("model.layers.1.mlp.up_proj.scales")}
    save_file(stored, path, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"no model.layers.1.mlp.up_proj.scales"):
        load_model(tmp_path, device="cpu")
    save_file(stored | scales, path, metadata={"format": "pt"})
    _edit(tmp_path, intermediate_size=64)
    with pytest.raises(ModelError, match="mlp"):
        load_model(tmp_path, device="cpu")
