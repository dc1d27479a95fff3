"""Decode steps as graphs: equal to the ordinary path, for batches that change in every way."""

import gc
import inspect
import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.cuda import CUDAGraph

from quire import GenerationRequest, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.engine.decode_graphs import WARM_UP_CALLS, CudaGraphs, graph_sizes, why_no_graphs
from quire.errors import ConfigError
from quire.models.loader import load_model
from support import engines
from support.engines import make_prompts
from support.kv_options import kv_config
from support.static_attention import RepeatedCalls, StaticGathered, TapedCalls, use_graphs

CPU = torch.device("cpu")
LENGTHS = (3, 22, 9, 17, 1, 24, 12, 5)


@pytest.fixture
def plain_linears(monkeypatch):
    """Linear layers of torch, so that a tape records all operations of a model."""
    monkeypatch.setattr("quire.models.adapter.prepare_linears", lambda *_: None)


@pytest.fixture
def model(plain_linears):
    return engines.load("llama", impl="transformers")


def engine_of(model, capture=None, *, memory="4MiB", max_num_seqs=6, **kv):
    schedule = ScheduleConfig(
        max_num_seqs=max_num_seqs, chunk_tokens=16, admission="optimistic", preempt="recompute"
    )
    config = kv_config(memory=memory, page_tokens=4, attention="gathered", **kv)
    engine = Engine(model, config, schedule)
    engine.pool.kv.backend = StaticGathered(CPU)
    if capture is not None:
        use_graphs(engine, max_num_seqs, capture=capture, required=True)
    return engine


def finish(engine, *tokens):
    for count in tokens:
        engine.submit(GenerationRequest([5, 6, 7], engines.greedy(count)))
    while engine.has_work:
        engine.step()


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


STATISTICS = [  # sums, a maximum over heads, several at once, stored queries, a budget's
    *("h2o:cap=12,every=2", "average:cap=12,heads=max,granularity=token"),
    *("roco:cap=16,recent=4,every=2", "scissorhands:cap=14,every=2"),
    *("snapkv:cap=12,window=4,every=2", "tova:cap=12,every=2"),
]
MOVES_SLOTS = ("recent:cap=12", "sinks:cap=12,sinks=2", "random:cap=12")


@pytest.mark.parametrize("codec", ["int8", "int4:group=8", "fp8", *MOVES_SLOTS, *STATISTICS])
def test_coded_pages_and_evictions_with_statistics_give_equal_tokens(model, codec):
    """A tape's capture runs the step once, as the calls before a capture do: it must not count."""
    kv = {"evict" if "cap=" in codec else "codec": codec}
    seed = 3 if "codec" in kv else 6 if codec in STATISTICS else 2
    stats, engine = compare(model, TapedCalls(), make_prompts(12, 20, seed=seed), **kv)
    assert "codec" in kv or engine.stats().num_evictions > 20
    assert stats.replayed > (15 if codec in STATISTICS else 20)


@pytest.mark.parametrize(
    ("kv", "options"), [({"memory": "20KiB"}, {}), ({}, {"n": 3, "temperature": 1.0, "seed": 5})]
)
def test_preempted_requests_and_samples_of_shared_pages_give_equal_tokens(model, kv, options):
    prompts = make_prompts(12 if kv else 6, 20, seed=4 + bool(options))
    stats, engine = compare(model, TapedCalls(), prompts, options=options, **kv)
    assert bool(engine.stats().num_preemptions) == bool(kv)
    assert stats.replayed > 20


def test_wider_page_tables_are_captured_again(model):
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


def test_rows_with_query_moments_and_plans_that_cannot_be_refreshed_run_without_a_graph(model):
    engine = engine_of(model, TapedCalls(), evict="expected_attention:cap=12")
    finish(engine, 20)
    assert engine.stats().graphs.replayed == 0
    assert engine.stats().graphs.not_replayed == 20

    engine = engine_of(model, TapedCalls())
    engine.pool.kv.backend.refuses = True
    finish(engine, 6)
    assert engine.stats().graphs.replayed == 0


class _Failing:
    """A capture that fails, as if the model read data in its forward."""

    def capture(self, call):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("without_plan", "message"),
    [
        (False, "operation not permitted when stream is capturing"),
        (True, "attention static_gathered cannot read these pages"),
    ],
)
def test_failed_captures_and_plans_turn_graphs_off_unless_they_are_required(
    model, without_plan, message
):
    for required in (False, True):
        engine = engine_of(model)
        graphs = use_graphs(engine, 6, CPU, _Failing(), required=required)
        if without_plan:
            engine.pool.kv.backend.static_plan = lambda *_: None
        engine.submit(GenerationRequest([5, 6, 7], engines.greedy(6)))
        engine.step()

        if required:
            with pytest.raises(ConfigError, match=f"{message}; leave it out"):
                engine.step()
        else:
            assert [token for _ in range(5) for d in engine.step() for token in d.token_ids]
            assert message in graphs.stats.off


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
        output = call()
        return Mock(replay=lambda: output)


def test_tensors_of_a_captured_call_live_as_long_as_its_graph(model):
    capture = _Forgetting()
    engine = engine_of(model, capture)
    finish(engine, 4)
    gc.collect()

    assert engine.stats().graphs.replayed == 3
    assert len(capture.tensors) == 1
    assert capture.tensors[0]() is not None
    engine.decode_graphs._graphs.clear()
    gc.collect()
    assert capture.tensors[0]() is None


def test_batches_share_a_graph_and_what_has_none_states_the_reason(model):
    engine = engine_of(model, TapedCalls())
    finish(engine, 6, 12, 12, 12)
    assert engine.stats().graphs.replayed > 8
    assert engine.stats().graphs.captures == 1

    assert [graph_sizes(1), graph_sizes(2)] == [(1,), (1, 2)]
    assert graph_sizes(100) == (1, 2, 4, 8, 16, 32, 64, 100) == (*graph_sizes(64), 100)
    plain = Engine(model, kv_config(memory="1MiB"), ScheduleConfig())
    window = engine_of(model, codec="int8+residual=8")

    assert plain.stats().graphs is None
    assert "new plan for every step" in why_no_graphs(plain.pool.kv)
    assert "full precision" in why_no_graphs(window.pool.kv)
    assert why_no_graphs(engine_of(model).pool.kv) is None
    with pytest.raises(ConfigError, match=r"the model is on cpu.*--no-cuda-graphs"):
        Engine(model, kv_config(memory="1MiB"), ScheduleConfig(cuda_graphs=True))


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


class Cuda:
    """The functions of `torch.cuda` that a capture calls.

    As in torch, the end of a failed capture raises before the stream is restored, and the handle of
    a pool is refused once all of its graphs were deleted.

    Attributes:
        current: the current stream.
        used: handles of the pools of all captures.
    """

    def __init__(self):
        self.current = SimpleNamespace(name="main", wait_stream=lambda other: None)
        self.used = []
        self._handles = 0

    def Stream(self, device):  # noqa: N802, torch's name
        return SimpleNamespace(name="capture", wait_stream=lambda other: None)

    def current_stream(self, device=None):
        return self.current

    def graph_pool_handle(self):
        self._handles += 1
        return self._handles

    def CUDAGraph(self):  # noqa: N802, torch's name
        return Mock(spec=CUDAGraph)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool=None, stream=None, *, capture_error_mode):
        assert capture_error_mode == "thread_local"  # other threads use the device
        self.used.append(pool)
        before, self.current = self.current, stream
        yield
        self.current = before  # not after an exception


@pytest.fixture
def cuda(monkeypatch):
    """The stand-in, in place of torch's functions."""
    found = Cuda()
    for name in ("Stream", "current_stream", "graph_pool_handle", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def test_a_capture_runs_on_its_own_stream_after_warm_up_calls(cuda):
    streams = []

    def call():
        streams.append(cuda.current.name)
        return torch.ones(1)

    captured = CudaGraphs(torch.device("cuda")).capture(call)

    assert streams == ["capture"] * (WARM_UP_CALLS + 1)
    assert cuda.current.name == "main"
    assert captured.replay() == 1


def test_a_failed_capture_restores_the_stream(cuda):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > WARM_UP_CALLS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="capturing"):
        CudaGraphs(torch.device("cuda")).capture(call)
    assert cuda.current.name == "main"
    assert cuda.used[1:] == [None]  # the second one restores the state of random numbers


def test_graphs_share_a_pool_until_all_of_them_are_deleted(cuda):
    capture, graphs = CudaGraphs(torch.device("cuda")), []
    graphs += [capture.capture(lambda: torch.ones(1)) for _ in range(3)]
    del graphs[:2]
    graphs.append(capture.capture(lambda: torch.ones(1)))

    assert len(set(cuda.used)) == 1
    graphs.clear()
    capture.capture(lambda: torch.ones(1))
    assert len(set(cuda.used)) == 2
