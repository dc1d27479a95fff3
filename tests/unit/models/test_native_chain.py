"""All layers of the native decoder as one chain of C calls, against one layer after the other."""

import pytest
import torch

from quire import LLM, KVConfig, SamplingParams, ScheduleConfig
from quire.engine.runner import StepBridge
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import has_products
from quire.kv.step import ChainedStep
from quire.models.native.decoder import Workspace

LIBRARY = load_library()
VOCAB = 300

pytestmark = pytest.mark.skipif(
    not (isinstance(LIBRARY, NativeLibrary) and has_products(LIBRARY)),
    reason="no C extension with vector instructions",
)


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}


def saved(model, path):
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def folder(request, tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(getattr(torch, request.param))
    return saved(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def windows_folder(tmp_path_factory):
    """A model whose first layer attends to all tokens, and whose other layers have a window."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(2)
    config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    return saved(Qwen2ForCausalLM(config), tmp_path_factory.mktemp("qwen2"))


def outputs(folder, kv=None, schedule=None, **sampling):
    """Tokens and log-probabilities of prompts, prefilled in chunks beside decode rows."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (1, 40, 7)
    ]
    schedule = schedule or ScheduleConfig(max_num_batched_tokens=16, chunk_tokens=16)
    llm = LLM(str(folder), model_impl="native", kv=kv or KVConfig(memory="4MiB"), schedule=schedule)
    options = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, seed=1, **sampling)
    made = llm.generate(prompts, options)
    llm.engine.check()
    llm.close()
    return [(output.token_ids, output.logprobs) for output in made]


def assert_chained_equals_single_layers(folder, monkeypatch, **sampling):
    chains = []
    run_layers = Workspace.run_layers
    monkeypatch.setattr(
        Workspace, "run_layers", lambda self, calls: chains.append(1) or run_layers(self, calls)
    )
    chained = outputs(folder, **sampling)
    assert chains
    monkeypatch.setattr(StepBridge, "chain", lambda self, layers, heads: None)
    chains.clear()

    assert outputs(folder, **sampling) == chained
    assert not chains


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}])
def test_chain_equals_single_layers(folder, sampling, monkeypatch):
    assert_chained_equals_single_layers(folder, monkeypatch, **sampling)


def test_batch_invariant_chain_equals_single_layers(folder, monkeypatch):
    schedule = ScheduleConfig(max_num_batched_tokens=16, chunk_tokens=16, batch_invariant=True)

    assert_chained_equals_single_layers(folder, monkeypatch, schedule=schedule, temperature=0.0)


def test_layers_with_and_without_a_window_share_a_chain(windows_folder, monkeypatch):
    assert_chained_equals_single_layers(windows_folder, monkeypatch, temperature=0.0)


@pytest.mark.parametrize("evict", ["recent:cap=16,sinks=4,every=4", "knorm:cap=12,every=2"])
def test_layers_that_evict_without_statistics_are_a_chain(folder, evict, monkeypatch):
    kv = KVConfig(memory="4MiB", page_tokens=4, evict=evict)

    assert_chained_equals_single_layers(folder, monkeypatch, kv=kv, temperature=0.0)


@pytest.mark.parametrize("codec", ["int8", "int8/int4"])
def test_layers_with_coded_pages_are_a_chain(folder, codec, monkeypatch):
    kv = KVConfig(memory="4MiB", codec=codec, evict="recent:cap=16,sinks=4,every=4")

    assert_chained_equals_single_layers(folder, monkeypatch, kv=kv, temperature=0.0)


CONTINUED = {
    "full": {},
    "int8": {"codec": "int8"},
    "evicted": {"page_tokens": 4, "evict": "recent:cap=24,sinks=4,every=4"},
    "sums": {"page_tokens": 4, "evict": "h2o:cap=24,every=4"},
    "stored queries": {"page_tokens": 4, "evict": "snapkv:cap=24,window=8,every=4"},
    "sums of heads apart": {
        "page_tokens": 4,
        "evict": "roco:cap=24,every=2,granularity=token",
    },
    "heads evicted apart": {"page_tokens": 4, "evict": "knorm:cap=24,every=2,granularity=token"},
    "preempted": {"memory": "120KiB", "page_tokens": 4, "swap_space": 0},  # swaps depend on times
}


def long_outputs(folder, options):
    """Outputs of prompts and forks that pass page ends, and sizes at which a row is divided."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (50, 3, 61)]
    llm = LLM(str(folder), model_impl="native", kv=KVConfig(**{"memory": "4MiB", **options}))
    sampling = SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=1, n=2)
    made = llm.generate(prompts, sampling)
    llm.engine.check()
    llm.close()
    return [choice.token_ids for output in made for choice in output.choices]


@pytest.mark.parametrize("options", CONTINUED.values(), ids=CONTINUED)
def test_continued_steps_equal_new_ones(folder, options, monkeypatch):
    continued, of = [], ChainedStep.continued

    def counted(*args):
        continued.append(of(*args))
        return continued[-1]

    monkeypatch.setattr(ChainedStep, "continued", counted)
    expected = long_outputs(folder, options)
    assert continued.count(None) < len(continued) // 2

    monkeypatch.setattr(ChainedStep, "continued", lambda *args: None)
    assert long_outputs(folder, options) == expected


def test_windows_are_continued_too(windows_folder, monkeypatch):
    expected = long_outputs(windows_folder, {"page_tokens": 4})

    monkeypatch.setattr(ChainedStep, "continued", lambda *args: None)
    assert long_outputs(windows_folder, {"page_tokens": 4}) == expected


def test_times_of_a_chain_include_attention(folder):
    llm = LLM(str(folder), model_impl="native", kv=KVConfig(memory="4MiB"))
    times = llm.engine.model.decoder.time_parts()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    llm.close()

    assert all(times.seconds().values())


STATISTICS = {  # sums, squares, a maximum over heads, all heads apart, stored queries
    "h2o": "h2o:cap=16,every=4",
    "roco": "roco:cap=18,every=2",
    "max": "average:cap=16,heads=max,granularity=token",
    "scissorhands": "scissorhands:cap=16,every=4",
    "snapkv": "snapkv:cap=16,window=4,every=4",
    "tova": "tova:cap=16,every=2",
    "kvcrush": "kvcrush:cap=24,base=h2o,every=4",
}


@pytest.mark.parametrize("evict", STATISTICS.values(), ids=STATISTICS)
def test_layers_with_statistics_are_a_chain(folder, evict, monkeypatch):
    kv = KVConfig(memory="4MiB", page_tokens=4, evict=evict)

    assert_chained_equals_single_layers(folder, monkeypatch, kv=kv, temperature=0.0)


def test_layers_run_one_by_one_if_tokens_have_query_moments(folder, monkeypatch):
    monkeypatch.setattr(Workspace, "run_layers", pytest.fail)

    outputs(folder, KVConfig(memory="4MiB", evict="expected_attention:cap=16"), temperature=0.0)


def test_layers_run_one_by_one_if_torch_encodes_their_tokens(folder, monkeypatch):
    monkeypatch.setattr(Workspace, "run_layers", pytest.fail)

    outputs(folder, KVConfig(memory="4MiB", codec="fp8"), temperature=0.0)
