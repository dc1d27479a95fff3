"""Decode steps as graphs: equal to the ordinary path, for batches that change in every way."""

import gc
import inspect
import weakref

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.decode_graphs import (
    CudaGraphs,
    DecodeGraphs,
    graph_sizes,
    why_no_graphs,
)
from quire.engine.runner import Runner
from quire.errors import ConfigError
from quire.models.loader import load_model
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.engines import make_prompts
from support.kv_options import kv_config
from support.static_attention import RepeatedCalls, StaticGathered, TapedCalls

CPU = torch.device("cpu")
LENGTHS = (3, 22, 9, 17, 1, 24, 12, 5)


@pytest.fixture
def plain_linears(monkeypatch):
    """Linear layers of torch, so that a tape records all operations of a model."""
    monkeypatch.setattr("quire.models.adapter.prepare_linears", lambda *_: None)


def engine_of(model, capture=None, *, memory="4MiB", max_num_seqs=6, **kv):
    """An engine with the test backend; with graphs if `capture` is given."""
    schedule = ScheduleConfig(
        max_num_seqs=max_num_seqs, chunk_tokens=16, admission="optimistic", preempt="recompute"
    )
    config = kv_config(memory=memory, page_tokens=4, attention="gathered", **kv)
    engine = Engine(model, config, schedule)
    engine.pool.kv.backend = StaticGathered(CPU)
    graphs = None
    if capture is not None:
        graphs = DecodeGraphs(model.decoder, engine.pool.kv, capture, max_num_seqs, required=True)
    step_size = engine.scheduler.step_size
    engine.decode_graphs = graphs
    engine.runner = Runner(model.decoder, engine.pool.kv, engine.times, step_size, graphs=graphs)
    return engine


def outputs(engine, prompts, **options):
    """Tokens of requests that join the batch over time and end at different lengths."""
    waiting = list(zip(prompts, LENGTHS * 2, strict=False))
    found, names = {}, []
    while waiting or engine.has_work:
        for prompt, tokens in waiting[:2]:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
            names.append(engine.submit(GenerationRequest(prompt, params)))
        del waiting[:2]
        for _ in range(3):
            for delta in engine.step():
                found.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    engine.check()
    return [found[key] for key in sorted(found, key=lambda key: (names.index(key[0]), key[1]))]


def compare(model, capture, prompts, *, options=None, **kv):
    """Run the prompts with and without graphs; return the counters of the graphs."""
    expected = outputs(engine_of(model, **kv), prompts, **(options or {}))
    engine = engine_of(model, capture, **kv)

    found = outputs(engine, prompts, **(options or {}))

    assert found == expected
    assert sum(map(len, found)) > 100
    stats = engine.stats().graphs
    assert stats.off is None
    return stats, engine


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"])
def test_batches_that_grow_and_shrink_give_equal_tokens(architecture):
    model = engines.load(architecture, impl="transformers")

    stats, _ = compare(model, TapedCalls(), make_prompts(12, 20, seed=1))

    assert stats.replayed > 20
    assert stats.not_replayed > 3
    assert 3 <= stats.captures < stats.replayed


def test_the_native_decoder_gives_equal_tokens():
    model = load_model("quire-tiny", verify=False)

    stats, _ = compare(model, RepeatedCalls(), [[20 + n, 21, 22] for n in range(12)])

    assert stats.replayed > 20


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("evict", ["recent:cap=12", "sinks:cap=12,sinks=2", "random:cap=12"])
def test_evictions_that_move_slots_give_equal_tokens(evict):
    model = engines.load("llama", impl="transformers")

    stats, engine = compare(model, TapedCalls(), make_prompts(12, 20, seed=2), evict=evict)

    assert engine.stats().num_evictions > 20
    assert stats.replayed > 20


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("codec", ["int8", "int4:group=8", "fp8"])
def test_coded_pages_give_equal_tokens(codec):
    model = engines.load("llama", impl="transformers")

    stats, _ = compare(model, TapedCalls(), make_prompts(12, 20, seed=3), codec=codec)

    assert stats.replayed > 20


@pytest.mark.usefixtures("plain_linears")
def test_preempted_requests_give_equal_tokens():
    model = engines.load("llama", impl="transformers")

    stats, engine = compare(model, TapedCalls(), make_prompts(12, 20, seed=4), memory="20KiB")

    assert engine.stats().num_preemptions > 0
    assert stats.replayed > 20


@pytest.mark.usefixtures("plain_linears")
def test_parallel_samples_of_shared_pages_give_equal_tokens():
    model = engines.load("llama", impl="transformers")
    options = {"n": 3, "temperature": 1.0, "seed": 5}

    stats, _ = compare(model, TapedCalls(), make_prompts(6, 20, seed=5), options=options)

    assert stats.replayed > 20


@pytest.mark.usefixtures("plain_linears")
def test_wider_page_tables_are_captured_again():
    model = engines.load("llama", impl="transformers")
    engine = engine_of(model, TapedCalls(), max_num_seqs=1)
    expected = engine_of(model, max_num_seqs=1)
    request = GenerationRequest([5, 6, 7], engines.greedy(150))  # 39 pages of 4 tokens

    for one in (engine, expected):
        one.submit(request)
    tokens = [
        [t for _ in range(151) for d in one.step() for t in d.token_ids]
        for one in (engine, expected)
    ]

    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 150
    assert engine.stats().graphs.captures == 3  # 16, 32 and 64 pages


STATISTICS = {  # sums, a maximum over heads, several at once, stored queries, a budget's
    "h2o": "h2o:cap=12,every=2",
    "max": "average:cap=12,heads=max,granularity=token",
    "roco": "roco:cap=16,recent=4,every=2",
    "scissorhands": "scissorhands:cap=14,every=2",
    "snapkv": "snapkv:cap=12,window=4,every=2",
    "tova": "tova:cap=12,every=2",
}


@pytest.mark.usefixtures("plain_linears")
@pytest.mark.parametrize("evict", STATISTICS.values(), ids=STATISTICS)
def test_attention_statistics_are_recorded_in_graphs(evict):
    """A tape's capture runs the step once, as the calls before a capture do: it must not count."""
    model = engines.load("llama", impl="transformers")

    stats, engine = compare(model, TapedCalls(), make_prompts(12, 20, seed=6), evict=evict)

    assert engine.stats().num_evictions > 20
    assert stats.replayed > 15


@pytest.mark.usefixtures("plain_linears")
def test_rows_with_query_moments_run_without_a_graph():
    model = engines.load("llama", impl="transformers")
    engine = engine_of(model, TapedCalls(), evict="expected_attention:cap=12")
    engine.submit(GenerationRequest([5, 6, 7], engines.greedy(20)))

    while engine.has_work:
        engine.step()

    assert engine.stats().graphs.replayed == 0
    assert engine.stats().graphs.not_replayed == 20


@pytest.mark.usefixtures("plain_linears")
def test_plans_that_cannot_be_refreshed_run_without_a_graph():
    model = engines.load("llama", impl="transformers")
    engine = engine_of(model, TapedCalls())
    engine.pool.kv.backend.refuses = True
    engine.submit(GenerationRequest([5, 6, 7], engines.greedy(6)))

    while engine.has_work:
        engine.step()

    assert engine.stats().graphs.replayed == 0


class _Failing:
    """A capture that fails, as if the model read data in its forward."""

    def capture(self, call):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.usefixtures("plain_linears")
def test_failed_captures_turn_graphs_off_unless_they_are_required():
    model = engines.load("llama", impl="transformers")
    for required in (False, True):
        engine = engine_of(model)
        kv, step = engine.pool.kv, engine.scheduler.step_size
        graphs = DecodeGraphs(model.decoder, kv, _Failing(), 6, required=required)
        engine.runner = Runner(model.decoder, kv, engine.times, step, graphs=graphs)
        engine.submit(GenerationRequest([5, 6, 7], engines.greedy(6)))
        engine.step()

        if required:
            with pytest.raises(ConfigError, match=r"not possible: .*capturing; leave it out"):
                engine.step()
        else:
            assert [token for _ in range(5) for d in engine.step() for token in d.token_ids]
            assert "not permitted" in graphs.stats.off


@pytest.mark.usefixtures("plain_linears")
def test_pages_without_a_static_plan_turn_graphs_off_unless_they_are_required():
    model = engines.load("llama", impl="transformers")
    for required in (False, True):
        engine = engine_of(model)
        kv, step = engine.pool.kv, engine.scheduler.step_size
        kv.backend.static_plan = lambda *_: None
        graphs = DecodeGraphs(model.decoder, kv, RepeatedCalls(), 6, required=required)
        engine.runner = Runner(model.decoder, kv, engine.times, step, graphs=graphs)
        engine.submit(GenerationRequest([5, 6, 7], engines.greedy(6)))
        engine.step()

        if required:
            with pytest.raises(ConfigError, match="cannot read these pages; leave it out"):
                engine.step()
        else:
            assert engine.step()[0].token_ids
            assert graphs.stats.off == "attention static_gathered cannot read these pages"


class _Forgetting:
    """A capture that keeps addresses only, as a CUDA graph does.

    Attributes:
        tensors: weak references to the tensors of the calls.
    """

    def __init__(self):
        self.tensors = []

    def capture(self, call):
        own = inspect.unwrap(call)  # the suite checks types of its first definitions
        cells = [cell.cell_contents for cell in own.__closure__]
        self.tensors += [weakref.ref(one) for one in cells if isinstance(one, torch.Tensor)]
        return _Constant(call())


class _Constant:
    """A captured computation with a fixed result."""

    def __init__(self, output):
        self._output = output

    def replay(self):
        return self._output


@pytest.mark.usefixtures("plain_linears")
def test_tensors_of_a_captured_call_live_as_long_as_its_graph():
    capture = _Forgetting()
    engine = engine_of(engines.load("llama", impl="transformers"), capture)
    engine.submit(GenerationRequest([5, 6, 7], engines.greedy(4)))
    while engine.has_work:
        engine.step()
    gc.collect()

    assert engine.stats().graphs.replayed == 3
    assert len(capture.tensors) == 1
    assert capture.tensors[0]() is not None
    engine.decode_graphs._graphs.clear()
    gc.collect()
    assert capture.tensors[0]() is None


@pytest.mark.usefixtures("plain_linears")
def test_full_and_padded_batches_share_a_graph():
    engine = engine_of(engines.load("llama", impl="transformers"), TapedCalls())
    for tokens in (6, 12, 12, 12):
        engine.submit(GenerationRequest([5, 6, 7], engines.greedy(tokens)))
    while engine.has_work:
        engine.step()

    assert engine.stats().graphs.replayed > 8
    assert engine.stats().graphs.captures == 1


def test_sizes_are_powers_of_two_and_the_largest_batch():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(2) == (1, 2)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert graph_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 100)


def test_backends_and_options_without_graphs_state_the_reason():
    model = engines.load("llama", impl="transformers")
    plain = Engine(model, kv_config(memory="1MiB"), ScheduleConfig())
    window = engine_of(model, codec="int8+residual=8")

    assert "new plan for every step" in why_no_graphs(plain.pool.kv)
    assert "full precision" in why_no_graphs(window.pool.kv)
    assert why_no_graphs(engine_of(model).pool.kv) is None


def test_required_graphs_on_a_cpu_are_refused_with_the_reason():
    model = engines.load("llama")

    with pytest.raises(ConfigError, match=r"the model is on cpu.*--no-cuda-graphs"):
        Engine(model, kv_config(memory="1MiB"), ScheduleConfig(cuda_graphs=True))
    assert Engine(model, kv_config(memory="1MiB"), ScheduleConfig()).stats().graphs is None


@pytest.mark.gpu
def test_random_numbers_work_after_a_capture_that_fails():
    capture, ones = CudaGraphs(torch.device("cuda", 0)), torch.ones(8, device="cuda")
    calls = []

    def reads_when_captured():
        calls.append(None)
        return ones * (ones.sum().item() if len(calls) > 2 else 8.0)

    with pytest.raises(RuntimeError, match="captur"):
        capture.capture(reads_when_captured)

    assert torch.randn(8, device="cuda").isfinite().all()
    assert capture.capture(lambda: ones * 2).replay().sum().item() == 16
