"""The native decoder equals Transformers; what it does not support is refused with a reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, UnknownName, UnsupportedModel
from quire.kernels.native.library import NativeLibrary, NotLoaded, load_library
from quire.kernels.native.linear import has_products
from quire.layout.statistics import ResidualSimilarity
from quire.models import loader
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall
from quire.models.loader import make_decoder
from quire.models.native.decoder import NativeDecoder
from quire.models.native.layers import refusal
from quire.models.verify import DenseAttention, compare_with_transformers
from quire.models.weights import weight_bytes
from support import zoo
from support.flat import flat_logits, sequences

LIBRARY = load_library()
TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded) or not has_products(LIBRARY),
    reason="no C extension with products for this CPU",
)


def native(name: str, codec: str | None = None, **options: object) -> NativeDecoder:
    assert isinstance(LIBRARY, NativeLibrary)
    return NativeDecoder(zoo.build(name, **options), LIBRARY, codec)


def reference_logits(
    name: str, prompts: list[Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    model = zoo.build(name, dtype=dtype)
    with torch.inference_mode():
        return [model(prompt.unsqueeze(0)).logits[0].float() for prompt in prompts]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", zoo.NATIVE)
def test_ragged_chunked_batches_give_transformers_logits(name: str) -> None:
    prompts = sequences(21, 13, 1, 17, vocab_size=zoo.VOCAB_SIZE)
    ours = flat_logits(native(name), prompts, chunk_tokens=[6, 5, 1, 1, 64])
    for actual, expected in zip(ours, reference_logits(name, prompts), strict=True):
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", zoo.NATIVE)
def test_bfloat16_is_near_float32(name: str) -> None:
    """As near as the bfloat16 layers of Transformers are, which round after every operation."""
    prompts = sequences(30, 5, vocab_size=zoo.VOCAB_SIZE)
    exact = zoo.build(name, dtype=torch.bfloat16).float()
    with torch.inference_mode():
        expected = [exact(prompt.unsqueeze(0)).logits[0] for prompt in prompts]
    ours = flat_logits(native(name, dtype=torch.bfloat16), prompts, chunk_tokens=[7])
    theirs = reference_logits(name, prompts, torch.bfloat16)
    for actual, rounded, wanted in zip(ours, theirs, expected, strict=True):
        assert distance(actual, wanted) < max(0.02, 1.1 * distance(rounded, wanted))


@pytest.mark.parametrize("name", zoo.NATIVE)
@pytest.mark.parametrize(("codec", "max_distance"), [("int8", 0.08), ("int4", 0.8)])
def test_quantized_weights_give_near_logits(name: str, codec: str, max_distance: float) -> None:
    prompts = sequences(20, vocab_size=zoo.VOCAB_SIZE)
    (ours,) = flat_logits(native(name, codec), prompts, chunk_tokens=[7])
    (expected,) = reference_logits(name, prompts)
    assert 0 < distance(ours, expected) < max_distance


@pytest.mark.parametrize("name", zoo.NATIVE)
@pytest.mark.parametrize("codec", [None, "int8"])
def test_modules_read_the_packed_weights(name: str, codec: str | None) -> None:
    """Paths that run the modules of Transformers compute with the same weights."""
    decoder = native(name, codec)
    compare_with_transformers(decoder, codec=codec or "auto")
    (prompt,) = sequences(9, vocab_size=zoo.VOCAB_SIZE)
    (ours,) = flat_logits(decoder, [prompt], chunk_tokens=[9])
    assert distance(decoder.reference_logits(prompt), ours) < (1e-5 if codec is None else 0.05)


@pytest.mark.parametrize("name", zoo.NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_stored_once(name: str, dtype: torch.dtype) -> None:
    model = zoo.build(name, dtype=dtype)
    before, linears = weight_bytes(model), count(model, nn.Linear)
    assert isinstance(LIBRARY, NativeLibrary)
    NativeDecoder(model, LIBRARY)
    assert linears > 0
    assert count(model, nn.Linear) == 0
    # panels of packed weights have 32 columns, those of zeros included
    assert before <= weight_bytes(model) < 1.35 * before


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.modules())


def test_logits_are_of_the_sampled_rows_in_their_order() -> None:
    decoder, (prompt,) = native("wide_llama"), sequences(8, vocab_size=zoo.VOCAB_SIZE)
    every = forward(decoder, prompt, list(range(8)))
    for rows in ([5, 0, 5], list(range(7, -1, -1)), [*range(8), 3, 3]):
        assert torch.equal(forward(decoder, prompt, rows), every[rows])
    assert forward(decoder, prompt, []).shape == (0, zoo.VOCAB_SIZE)


def test_batch_without_tokens_has_no_logits() -> None:
    assert forward(native("wide_llama"), torch.tensor([], dtype=torch.int64), []).shape == (
        0,
        zoo.VOCAB_SIZE,
    )


def test_smaller_and_larger_batches_reuse_the_buffers() -> None:
    decoder = native("wide_qwen3")
    prompts = sequences(3, 40, 1, 17, 40, vocab_size=zoo.VOCAB_SIZE)
    for prompt, expected in zip(prompts, reference_logits("wide_qwen3", prompts), strict=True):
        found = forward(decoder, prompt, list(range(len(prompt))))
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", zoo.NATIVE)
def test_attention_receives_the_calls_of_the_modules(name: str) -> None:
    calls = []
    for decoder in (native(name), TransformersDecoder(zoo.build(name))):
        recorder = Recorder(5)
        assert decoder.prepare_recomputation() is None
        assert decoder.prepare(ResidualSimilarity()) is None
        forward(decoder, torch.arange(5), [4], recorder)
        calls.append(recorder)
    ours, theirs = calls
    assert ours.calls == theirs.calls
    for found, expected in zip(ours.inputs, theirs.inputs, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    for found, expected in zip(ours.cosines, theirs.cosines, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


class Recorder:
    """Dense attention that records its calls, the layers' inputs and residual similarities."""

    wants_inputs = wants_residual_similarity = True

    def __init__(self, tokens: int) -> None:
        self._batch = DenseAttention().batch([0] * tokens, range(tokens))
        self.calls: list[tuple[int, float, int | None]] = []
        self.inputs: list[Tensor] = []
        self.cosines: list[Tensor] = []

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append((call.layer, call.scale, call.window))
        return self._batch.attend(call, query, key, value)

    def note_input(self, layer: int, inputs: Tensor) -> None:
        assert layer == len(self.inputs)
        self.inputs.append(inputs)

    def note_residual_similarity(self, layer: int, cosines: Tensor) -> None:
        assert layer == len(self.cosines)
        self.cosines.append(cosines)


def forward(
    decoder: TransformersDecoder, prompt: Tensor, rows: list[int], attention: object = None
) -> Tensor:
    owners = [0] * len(prompt)
    attention = attention or DenseAttention().batch(owners, range(len(prompt)))
    positions, sampled = torch.arange(len(prompt)), torch.tensor(rows, dtype=torch.int64)
    return decoder.forward(prompt, positions, sampled, attention)


# ---- refusal and selection -----------------------------------------------------------------------


def with_activation(name: str) -> nn.Module:
    model = zoo.build("wide_llama")
    model.config.hidden_act = name
    return model


def with_derived_layer() -> nn.Module:
    class Derived(nn.Linear):
        pass

    model = zoo.build("wide_llama")
    model.model.layers[1].mlp.up_proj = Derived(64, 80, bias=False)
    return model


def with_mlp_bias() -> nn.Module:
    model = zoo.build("wide_llama")
    model.model.layers[0].mlp.down_proj = nn.Linear(80, 64)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "architecture": (lambda: zoo.build("gemma2"), "Gemma2ForCausalLM is not among"),
    "head_dim": (lambda: zoo.build("qwen2"), "heads have 8 elements"),
    "dtype": (lambda: zoo.build("wide_llama", dtype=torch.float16), "torch.float16"),
    "activation": (lambda: with_activation("gelu"), "activation is 'gelu'"),
    "adapter": (with_derived_layer, "up_proj is a Derived"),
    "bias": (with_mlp_bias, "MLP has biases"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_states_the_reason(case: str) -> None:
    make, words = REFUSED[case]
    model = make()
    before = count(model, nn.Linear)
    assert words in (refusal(model) or "")
    with pytest.raises(ConfigError, match="model_impl=native is not possible"):
        make_decoder(model, None, impl="native", codec="auto")
    assert isinstance(LIBRARY, NativeLibrary)
    with pytest.raises(UnsupportedModel, match="load it with model_impl=transformers"):
        NativeDecoder(model, LIBRARY)
    assert count(model, nn.Linear) == before  # refused before a layer is changed


def test_auto_selects_native_where_it_is_supported() -> None:
    assert kind_of(zoo.build("wide_llama"), "auto") is NativeDecoder
    assert kind_of(zoo.build("wide_llama"), "native") is NativeDecoder
    assert kind_of(zoo.build("wide_llama"), "transformers") is TransformersDecoder
    assert kind_of(zoo.build("gemma2"), "auto") is TransformersDecoder


def test_without_the_library_auto_selects_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_library", lambda: NotLoaded("no compiler"))
    assert kind_of(zoo.build("wide_llama"), "auto") is TransformersDecoder
    with pytest.raises(ConfigError, match="model_impl=native is not possible: no compiler"):
        kind_of(zoo.build("wide_llama"), "native")


def kind_of(model: nn.Module, impl: str) -> type[TransformersDecoder]:
    return type(make_decoder(model, None, impl=impl, codec="auto"))


@pytest.mark.parametrize(("impl", "codec"), [("fast", "auto"), ("auto", "int3")])
def test_unknown_names_are_refused(impl: str, codec: str) -> None:
    with pytest.raises(UnknownName):
        make_decoder(zoo.build("wide_llama"), None, impl=impl, codec=codec)


def test_implementation_is_named_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        native = loader.choose_implementation(zoo.build("wide_llama"), None, "auto")
        requested = loader.choose_implementation(zoo.build("wide_llama"), None, "transformers")
        other = loader.choose_implementation(zoo.build("gpt2"), None, "auto")

    assert (native.name, native.reason) == (
        "native",
        "LlamaForCausalLM has fused layers for this CPU",
    )
    assert (requested.name, requested.reason) == ("transformers", "as requested")
    assert other.name == "transformers"
    assert "GPT2LMHeadModel is not among the fused architectures" in other.reason
    assert "model implementation: native (LlamaForCausalLM" in caplog.text


def test_engine_stats_have_the_implementation() -> None:
    found = LLM("quire-tiny", kv=KVConfig(memory="1MiB"), verify=False).engine.stats()

    assert found.model_impl in ("native", "transformers")
    assert found.model_impl_reason
