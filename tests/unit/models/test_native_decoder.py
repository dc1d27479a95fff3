"""The native decoder equals Transformers, layer by layer and in one chain of C calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from quire import LLM, KVConfig, SamplingParams, ScheduleConfig
from quire.engine.runner import StepBridge
from quire.errors import ConfigError, UnknownName, UnsupportedModel
from quire.kernels.native.library import NativeLibrary, NotLoaded, load_library
from quire.kernels.native.linear import has_products
from quire.kv.step import ChainedStep
from quire.layout.statistics import ResidualSimilarity
from quire.models import loader
from quire.models.adapter import TransformersDecoder
from quire.models.loader import make_decoder
from quire.models.native.decoder import NativeDecoder, Workspace
from quire.models.native.layers import refusal
from quire.models.verify import DenseAttention, compare_with_transformers
from quire.models.weights import weight_bytes
from support import zoo
from support.engines import greedy
from support.flat import Recorder, distance, flat_logits, plain_logits, sequences

LIBRARY = load_library()

pytestmark = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded) or not has_products(LIBRARY),
    reason="no C extension with products for this CPU",
)


def native(name: str, codec: str | None = None, **options: object) -> NativeDecoder:
    assert isinstance(LIBRARY, NativeLibrary)
    return NativeDecoder(zoo.build(name, **options), LIBRARY, codec)


@pytest.mark.parametrize("name", zoo.NATIVE)
def test_ragged_batches_give_transformers_logits_and_bfloat16_is_near(name):
    prompts = sequences(21, 13, 1, 17, vocab_size=zoo.VOCAB_SIZE)
    ours = flat_logits(native(name), prompts, chunk_tokens=[6, 5, 1, 1, 64])
    torch.testing.assert_close(ours, plain_logits(zoo.build(name), *prompts), atol=1e-4, rtol=0)

    # as near as the bfloat16 layers of Transformers are, which round after every operation
    prompts = sequences(30, 5, vocab_size=zoo.VOCAB_SIZE)
    model = zoo.build(name, dtype=torch.bfloat16)
    theirs, expected = plain_logits(model, *prompts), plain_logits(model.float(), *prompts)
    ours = flat_logits(native(name, dtype=torch.bfloat16), prompts, chunk_tokens=[7])
    for actual, rounded, wanted in zip(ours, theirs, expected, strict=True):
        assert distance(actual, wanted) < max(0.02, 1.1 * distance(rounded, wanted))


@pytest.mark.parametrize("name", zoo.NATIVE)
@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_modules_read_the_packed_weights(name: str, codec: str | None) -> None:
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
    decoder, (prompt,) = native("wide_qwen3"), sequences(8, vocab_size=zoo.VOCAB_SIZE)
    every = forward(decoder, prompt, list(range(8)))
    for rows in ([5, 0, 5], list(range(7, -1, -1)), [*range(8), 3, 3]):
        assert torch.equal(forward(decoder, prompt, rows), every[rows])
    for tokens in (prompt, prompt[:0]):
        assert forward(decoder, tokens, []).shape == (0, zoo.VOCAB_SIZE)
    # smaller and larger batches reuse the buffers
    prompts = sequences(3, 40, 1, 17, 40, vocab_size=zoo.VOCAB_SIZE)
    found = [forward(decoder, prompt, list(range(len(prompt)))) for prompt in prompts]
    expected = plain_logits(zoo.build("wide_qwen3"), *prompts)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", zoo.NATIVE)
def test_attention_receives_the_calls_of_the_modules(name: str) -> None:
    calls = []
    for decoder in (native(name), TransformersDecoder(zoo.build(name))):
        recorder = Recorder(range(5))
        assert decoder.prepare_recomputation() is None
        assert decoder.prepare(ResidualSimilarity()) is None
        forward(decoder, torch.arange(5), [4], recorder)
        calls.append(recorder)
    ours, theirs = calls
    found, expected = (
        [(call.layer, call.scale, call.window) for call in one.calls.values()] for one in calls
    )
    assert found == expected
    torch.testing.assert_close(ours.inputs, theirs.inputs, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.cosines, theirs.cosines, atol=1e-4, rtol=0)


def forward(
    decoder: TransformersDecoder, prompt: Tensor, rows: list[int], attention: object = None
) -> Tensor:
    owners = [0] * len(prompt)
    attention = attention or DenseAttention().batch(owners, range(len(prompt)))
    positions, sampled = torch.arange(len(prompt)), torch.tensor(rows, dtype=torch.int64)
    return decoder.forward(prompt, positions, sampled, attention)


def changed(name: str, value: object) -> nn.Module:
    model = zoo.build("wide_llama")
    if isinstance(value, nn.Module):
        model.set_submodule(name, value)
    else:
        setattr(model.config, name, value)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "architecture": (lambda: zoo.build("gemma2"), "Gemma2ForCausalLM is not among"),
    "head_dim": (lambda: zoo.build("qwen2"), "heads have 8 elements"),
    "dtype": (lambda: zoo.build("wide_llama", dtype=torch.float16), "torch.float16"),
    "activation": (lambda: changed("hidden_act", "gelu"), "activation is 'gelu'"),
    "adapter": (
        lambda: changed("model.layers.1.mlp.up_proj", Derived(64, 80, bias=False)),
        "up_proj is a Derived",
    ),
    "bias": (lambda: changed("model.layers.0.mlp.down_proj", nn.Linear(80, 64)), "MLP has biases"),
}


class Derived(nn.Linear):
    pass


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


def test_auto_selects_native_where_it_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"auto": NativeDecoder, "native": NativeDecoder, "transformers": TransformersDecoder}
    for impl, kind in kinds.items():
        assert kind_of(zoo.build("wide_llama"), impl) is kind
    assert kind_of(zoo.build("gemma2"), "auto") is TransformersDecoder
    monkeypatch.setattr(loader, "load_library", lambda: NotLoaded("no compiler"))
    assert kind_of(zoo.build("wide_llama"), "auto") is TransformersDecoder
    with pytest.raises(ConfigError, match="model_impl=native is not possible: no compiler"):
        kind_of(zoo.build("wide_llama"), "native")
    for options in ({"impl": "fast", "codec": "auto"}, {"impl": "auto", "codec": "int3"}):
        with pytest.raises(UnknownName):
            make_decoder(zoo.build("wide_llama"), None, **options)


def kind_of(model: nn.Module, impl: str) -> type[TransformersDecoder]:
    return type(make_decoder(model, None, impl=impl, codec="auto"))


def test_implementation_is_named_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        native, requested, other = (
            loader.choose_implementation(zoo.build(name), None, impl)
            for name, impl in zip(
                ("wide_llama", "wide_llama", "gpt2"), ("auto", "transformers", "auto"), strict=True
            )
        )

    assert native.text == "native (LlamaForCausalLM has fused layers for this CPU)"
    assert requested.text == "transformers (as requested)"
    assert other.name == "transformers"
    assert "GPT2LMHeadModel is not among the fused architectures" in other.reason
    assert "model implementation: native (LlamaForCausalLM" in caplog.text


VOCAB = 300


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request, tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, request.param))
    model.save_pretrained(path := tmp_path_factory.mktemp("llama"))
    return path


@pytest.fixture(scope="module")
def windows_folder(tmp_path_factory):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(2)
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    Qwen2ForCausalLM(config).save_pretrained(path := tmp_path_factory.mktemp("qwen2"))
    return path


def prompts_of(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def outputs(folder, schedule=None, temperature=0.0, top_p=1.0, **kv):
    """Tokens and log-probabilities of prompts, prefilled in chunks beside decode rows."""
    schedule = ScheduleConfig(max_num_batched_tokens=16, chunk_tokens=16, **(schedule or {}))
    kv = KVConfig(**{"memory": "4MiB", **kv})
    llm = LLM(str(folder), model_impl="native", kv=kv, schedule=schedule)
    options = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, "seed": 1}
    sampling = SamplingParams(temperature=temperature, top_p=top_p, **options)
    made = llm.generate(prompts_of((1, 40, 7), seed=3), sampling)
    llm.engine.check()
    llm.close()
    return [(output.token_ids, output.logprobs) for output in made]


def assert_chained_equals_single_layers(folder, monkeypatch, **options):
    chains, run_layers = [], Workspace.run_layers
    monkeypatch.setattr(
        Workspace, "run_layers", lambda self, calls: chains.append(1) or run_layers(self, calls)
    )
    chained = outputs(folder, **options)
    assert chains
    monkeypatch.setattr(StepBridge, "chain", lambda self, layers, heads: None)
    chains.clear()

    assert outputs(folder, **options) == chained
    assert not chains


def test_windows_share_a_chain_whose_times_include_attention(windows_folder, monkeypatch, folder):
    llm = LLM(str(folder), model_impl="native", kv=KVConfig(memory="4MiB"))
    times = llm.engine.model.decoder.time_parts()
    llm.generate([[1, 2, 3]], greedy(4))
    llm.close()
    assert all(times.seconds().values())
    assert_chained_equals_single_layers(windows_folder, monkeypatch)  # leaves no chains


RECENT = {"evict": "recent:cap=16,sinks=4,every=4"}
STATISTICS = [  # sums, squares, a maximum over heads, all heads apart, stored queries
    *("h2o:cap=16,every=4", "roco:cap=18,every=2", "scissorhands:cap=16,every=4"),
    *("average:cap=16,heads=max,granularity=token", "snapkv:cap=16,window=4,every=4"),
    *("tova:cap=16,every=2", "kvcrush:cap=24,base=h2o,every=4"),
]


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"temperature": 0.9, "top_p": 0.9}, {"schedule": {"batch_invariant": True}}),
        *(RECENT | {"page_tokens": 4}, {"evict": "knorm:cap=12,every=2", "page_tokens": 4}),
        *(RECENT | {"codec": codec} for codec in ("int8", "int8/int4")),
        *({"page_tokens": 4, "evict": rule} for rule in STATISTICS),
    ],
    ids=str,
)
def test_chain_equals_single_layers(folder, options, monkeypatch):
    assert_chained_equals_single_layers(folder, monkeypatch, **options)


WINDOWS = {"page_tokens": 4}
CONTINUED = {
    "full": {},
    "windows": WINDOWS,
    "int8": {"codec": "int8"},
    "evicted": {"page_tokens": 4, "evict": "recent:cap=24,sinks=4,every=4"},
    "sums": {"page_tokens": 4, "evict": "h2o:cap=24,every=4"},
    "stored queries": {"page_tokens": 4, "evict": "snapkv:cap=24,window=8,every=4"},
    "sums of heads apart": {"page_tokens": 4, "evict": "roco:cap=24,every=2,granularity=token"},
    "heads evicted apart": {"page_tokens": 4, "evict": "knorm:cap=24,every=2,granularity=token"},
    "preempted": {"memory": "120KiB", "page_tokens": 4, "swap_space": 0},  # swaps depend on times
}


def long_outputs(folder, options):
    """Outputs of prompts and forks that pass page ends, and sizes at which a row is divided."""
    llm = LLM(str(folder), model_impl="native", kv=KVConfig(**{"memory": "4MiB", **options}))
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=1, n=2)
    made = llm.generate(prompts_of((50, 3, 61), seed=4), sampling)
    llm.engine.check()
    llm.close()
    return [choice.token_ids for output in made for choice in output.choices]


@pytest.mark.parametrize("options", CONTINUED.values(), ids=CONTINUED)
def test_continued_steps_equal_new_ones(folder, windows_folder, options, monkeypatch):
    continued, of = [], ChainedStep.continued

    def counted(*args):
        continued.append(of(*args))
        return continued[-1]

    folder = windows_folder if options == WINDOWS else folder
    monkeypatch.setattr(ChainedStep, "continued", counted)
    expected = long_outputs(folder, options)
    assert continued.count(None) < len(continued) // 2 or options == WINDOWS

    monkeypatch.setattr(ChainedStep, "continued", lambda *args: None)
    assert long_outputs(folder, options) == expected


@pytest.mark.parametrize("kv", [{"evict": "expected_attention:cap=16"}, {"codec": "fp8"}], ids=str)
def test_layers_run_one_by_one_with_query_moments_or_codes_by_torch(folder, kv, monkeypatch):
    monkeypatch.setattr(Workspace, "run_layers", pytest.fail)
    outputs(folder, **kv)
