"""All layers of the native decoder as one chain of C calls, against one layer after the other."""

import pytest
import torch

from quire import LLM, KVConfig, SamplingParams, ScheduleConfig
from quire.engine.runner import StepBridge
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import has_products
from quire.kv.step import ChainedStep
from quire.models.native.decoder import Workspace
from support.engines import greedy

LIBRARY = load_library()
VOCAB = 300

pytestmark = pytest.mark.skipif(
    not (isinstance(LIBRARY, NativeLibrary) and has_products(LIBRARY)),
    reason="no C extension with vector instructions",
)


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
    """A model whose first layer attends to all tokens, and whose other layers have a window."""
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


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "top_p": 0.9}, {"schedule": {"batch_invariant": True}}],
    ids=["greedy", "drawn", "batch-invariant"],
)
def test_chain_equals_single_layers(folder, options, monkeypatch):
    assert_chained_equals_single_layers(folder, monkeypatch, **options)


def test_layers_with_and_without_a_window_share_a_chain(windows_folder, monkeypatch):
    assert_chained_equals_single_layers(windows_folder, monkeypatch)


def test_times_of_a_chain_include_attention(folder):
    llm = LLM(str(folder), model_impl="native", kv=KVConfig(memory="4MiB"))
    times = llm.engine.model.decoder.time_parts()
    llm.generate([[1, 2, 3]], greedy(4))
    llm.close()

    assert all(times.seconds().values())


RECENT = {"evict": "recent:cap=16,sinks=4,every=4"}


@pytest.mark.parametrize(
    "kv",
    [
        *(RECENT | {"page_tokens": 4}, {"evict": "knorm:cap=12,every=2", "page_tokens": 4}),
        *(RECENT | {"codec": codec} for codec in ("int8", "int8/int4")),
    ],
    ids=str,
)
def test_layers_without_statistics_and_with_coded_pages_are_a_chain(folder, kv, monkeypatch):
    assert_chained_equals_single_layers(folder, monkeypatch, **kv)


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


STATISTICS = [  # sums, squares, a maximum over heads, all heads apart, stored queries
    *("h2o:cap=16,every=4", "roco:cap=18,every=2", "scissorhands:cap=16,every=4"),
    *("average:cap=16,heads=max,granularity=token", "snapkv:cap=16,window=4,every=4"),
    *("tova:cap=16,every=2", "kvcrush:cap=24,base=h2o,every=4"),
]


@pytest.mark.parametrize("evict", STATISTICS)
def test_layers_with_statistics_are_a_chain(folder, evict, monkeypatch):
    assert_chained_equals_single_layers(folder, monkeypatch, page_tokens=4, evict=evict)


@pytest.mark.parametrize("kv", [{"evict": "expected_attention:cap=16"}, {"codec": "fp8"}], ids=str)
def test_layers_run_one_by_one_with_query_moments_or_codes_by_torch(folder, kv, monkeypatch):
    monkeypatch.setattr(Workspace, "run_layers", pytest.fail)

    outputs(folder, **kv)
