"""Asynchronous scheduling: equal outputs, one read a step, launches before reads; devices."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from quire import AsyncLLM
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine import async_steps
from quire.engine.core import Engine
from quire.engine.runner import Runner
from quire.engine.shared_pool import SharedPool
from quire.errors import ConfigError, EngineDead
from quire.eviction import decisions
from quire.kernels import device_copies
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import load_library
from quire.kernels.triton.hardware import why_no_triton
from quire.models.layer_source import LayerSource
from quire.models.loader import LoadedModel
from quire.parallel.group import OneRank
from quire.sampling import sampling_step
from quire.sampling.outputs import OutputDelta
from quire.sampling.sampler import Sampler
from quire.scheduler.lanes import LaneCapacities
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import EVICTION, NO_PAGES, PREEMPTED
from support import engines
from support.byte_tokenizer import byte_tokenizer
from support.engines import make_prompts
from support.exact_products import use_exact_products
from support.host_waits import DEVICE, dataless, recorded_waits
from support.interpreted import CPU, triton_backend
from support.kv_options import kv_config
from support.static_attention import use_graphs

END_TOKENS = (7, 19, 31, 43, 55, 67)
"""So many end tokens that random outputs end in their middle."""


def model_with_text(impl: str = "auto", device: str = "cpu") -> LoadedModel:
    """A zoo model with a tokenizer of bytes and end tokens."""
    model = engines.load("llama", device, impl=impl)
    generation = replace(model.generation, eos_token_ids=END_TOKENS)
    return replace(model, tokenizer=byte_tokenizer(), generation=generation)


@dataclass
class Output:
    """What a client gets of one completion; logprobs of the tokens, and of the prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    embedding: Any = None

    def add(self, delta: OutputDelta) -> None:
        """Add a delta."""
        assert self.reason is None, "a delta after the last one"
        self.tokens += delta.token_ids
        self.text += delta.text
        self.reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.error = delta.error
        self.logprobs += [(t.token_id, round(t.logprob, 3), t.rank) for t in delta.logprobs or ()]
        scores = [score for score in delta.prompt_logprobs or () if score is not None]
        self.logprobs += [(s.token_id, round(s.logprob, 3), s.rank) for s in scores]
        if delta.embedding is not None:
            self.embedding = [round(float(value), 3) for value in delta.embedding]


Outputs = dict[tuple[str, int], Output]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests and the options of an engine; `wave` requests are submitted every `steps` steps."""

    prompts: Sequence[list[int]]
    params: Sequence[Mapping[str, object]]
    kv: Mapping[str, object] = field(default_factory=dict)
    schedule: Mapping[str, object] = field(default_factory=dict)
    wave: int = 4
    steps: int = 3

    def engine(self, model: LoadedModel, *, asynchronous: bool) -> Engine:
        """An idle engine."""
        kv = {"memory": "1MiB", "page_tokens": 4} | dict(self.kv)
        schedule = {"max_num_seqs": 6, "admission": "optimistic"} | dict(self.schedule)
        config = ScheduleConfig(async_scheduling=asynchronous, **schedule)
        return Engine(model, kv_config(**kv), config)

    def request(self, number: int) -> GenerationRequest:
        """The request with this number; its id is `r` and the number."""
        options = self.params[number % len(self.params)]
        if not options.get("use_beam_search"):
            options = {"seed": number, **options}
        params = SamplingParams(**options)
        return GenerationRequest(self.prompts[number], params, request_id=f"r{number}")

    def run(self, engine: Engine, before: Callable[[int], None] = lambda _: None) -> Outputs:
        """Run all requests on an idle engine, with its checks; `before` gets the step."""
        outputs: Outputs = {}
        submitted, step = 0, 0
        while submitted < len(self.prompts) or engine.has_work:
            if step % self.steps == 0:
                for number in range(submitted, min(submitted + self.wave, len(self.prompts))):
                    engine.submit(self.request(number))
                    submitted = number + 1
            before(step)
            for delta in engine.step():
                outputs.setdefault((delta.request_id, delta.index), Output()).add(delta)
            engine.check()
            step += 1
        assert not engine.scheduler.running
        return outputs


GREEDY = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}
SHORT = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "seed": 5, "max_tokens": 20}
SCORED = {"temperature": 0.9, "seed": 6, "max_tokens": 12, "logprobs": 3}
STOP_TEXT = {"temperature": 1.2, "seed": 7, "max_tokens": 24, "stop": tuple("abcdefgh")}
STOP_TOKEN = {"temperature": 1.0, "max_tokens": 24, "stop_token_ids": tuple(range(60, 90))}
MIN_TOKENS = {"temperature": 1.0, "max_tokens": 24, "min_tokens": 6}
PENALTIES = {"temperature": 0.0, "max_tokens": 16, "repetition_penalty": 1.8}
BANNED = {"temperature": 0.0, "max_tokens": 16, "bad_token_ids": ((3, 4), (9,), (60, 61))}
PATTERN = {"temperature": 1.0, "max_tokens": 16, "structured_outputs": {"regex": "[a-d]{3}-[0-9]*"}}
SAMPLES = {"temperature": 1.0, "max_tokens": 10, "n": 3}
RANKED = {"temperature": 1.0, "max_tokens": 8, "n": 2, "best_of": 3}
BEAMS = {"max_tokens": 8, "use_beam_search": True, "beam_width": 3, "n": 2}
PROMPT_SCORES = {"temperature": 0.0, "max_tokens": 6, "prompt_logprobs": 2}
EMBEDDING = {"max_tokens": 0, "pooling": "mean"}
SIMPLE = [GREEDY, SEEDED, SCORED, STOP_TEXT, SHORT, STOP_TOKEN, MIN_TOKENS]
SMALL = {"memory": "20KiB"}
SINKS = "sinks:cap=24,sinks=2,every=8"

WORK = {
    "greedy": ([GREEDY, SHORT], {}, {}),
    "sampling": (SIMPLE, {}, {}),
    "chunks": (SIMPLE, {}, {"chunk_tokens": 5, "max_num_batched_tokens": 16}),
    "few_tokens_in_a_step": (SIMPLE, {}, {"max_num_batched_tokens": 4}),
    "read_output": ([PENALTIES, BANNED, PATTERN, GREEDY, SEEDED], {}, {}),
    "samples": ([SAMPLES, GREEDY, RANKED, SEEDED], {}, {"max_num_seqs": 9}),
    "recompute": (SIMPLE, SMALL, {"preempt": "recompute"}),
    "swap": (SIMPLE, {**SMALL, "swap_space": "1MiB"}, {"preempt": "swap"}),
    "no_prefix_cache": (SIMPLE, {"enable_prefix_caching": False}, {}),
    "sinks": ([GREEDY, SEEDED], {"evict": SINKS}, {}),
    "pieces": ([GREEDY, SEEDED], {"evict": f"{SINKS},granularity=chunk,chunk_tokens=2"}, {}),
    "h2o": ([GREEDY, SEEDED], {"evict": "h2o:cap=24,every=8"}, {}),
    "h2o_in_little_memory": (SIMPLE, {"evict": "h2o:cap=12", **SMALL}, {"preempt": "recompute"}),
    "int8": (SIMPLE, {"codec": "int8"}, {}),
    "drained": ([GREEDY, BEAMS, SEEDED, PROMPT_SCORES, SCORED, EMBEDDING, PATTERN], {}, {}),
    "drained_in_little_memory": (
        *([GREEDY, SEEDED, PROMPT_SCORES, SCORED, SAMPLES, PATTERN], {"memory": "22KiB"}),
        {"preempt": "recompute"},
    ),
}
MIN_AHEAD = {"pieces": 0.3, "h2o_in_little_memory": 0, "drained": 0.2}
"""Least fraction of the steps that are planned ahead; 0.5 of all others."""


@pytest.fixture(scope="module")
def model():
    return model_with_text()


def work(name, number=10):
    """The requests and options of a name; prompts of 1 to 22 tokens, some with a common prefix."""
    params, kv, schedule = WORK[name]
    prompts = make_prompts(number, 22, seed=len(name))
    prompts[-1] = prompts[1] + [5, 6]
    return Work(prompts=prompts, params=params, kv=kv, schedule=schedule)


REASONS = {  # of steps that wait, at least
    "recompute": {NO_PAGES},
    "pieces": {EVICTION},
    "drained": {async_steps.BEAMS, async_steps.NO_TOKENS},
    "drained_in_little_memory": {async_steps.PROMPT_SCORES},
}


@pytest.mark.parametrize("name", WORK)
def test_asynchronous_scheduling_gives_equal_outputs(model, name):
    engines_of = [work(name).engine(model, asynchronous=mode) for mode in (False, True)]

    expected, found = (work(name).run(engine) for engine in engines_of)

    assert found == expected
    stats = engines_of[1].stats()
    waited, reasons = stats.async_scheduling.waited, REASONS.get(name, set())
    assert stats.async_scheduling.ahead > stats.num_steps * MIN_AHEAD.get(name, 0.5) - 1
    assert reasons <= waited.keys()
    assert EVICTION in reasons or EVICTION not in waited or name.startswith("h2o")
    assert all(waited.values())
    if name not in ("samples", "drained"):  # completions that are not returned are served too
        for engine in engines_of:  # each token counts once
            [served] = engine.stats().served
            assert served.output_tokens == sum(len(output.tokens) for output in found.values())


def test_only_outputs_that_end_early_discard_a_row(model):
    by_length = Work(prompts=make_prompts(8, 9, seed=1), params=[GREEDY, SHORT])
    by_token = Work(prompts=make_prompts(8, 9, seed=1), params=[{**SEEDED, "seed": 1}])
    lengths, ends = (w.engine(model, asynchronous=True) for w in (by_length, by_token))

    by_length.run(lengths)
    found = by_token.run(ends)

    ended = sum(output.reason == "stop" for output in found.values())
    assert lengths.stats().async_scheduling.discarded == 0
    assert ends.stats().async_scheduling.discarded == ended > 2


def check_cancelled(found, expected, cancelled):
    """Check that these requests at most were cancelled, and that all others are equal."""
    for key, output in found.items():
        if output.reason == "abort":
            assert key[0] in cancelled
            assert output.tokens == expected[key].tokens[: len(output.tokens)]
        else:
            assert output == expected[key]


def test_cancelled_requests_end_preempted_ones_keep_their_token_and_others_are_equal(model):
    some = work("sampling")
    expected = some.run(some.engine(model, asynchronous=False))
    engine = some.engine(model, asynchronous=True)

    def cancel(step):
        if step in (2, 5, 6):
            engine.cancel(f"r{step}")

    check_cancelled(some.run(engine, cancel), expected, {"r2", "r5", "r6"})
    engine = some.engine(model, asynchronous=True)

    def preempt(step):
        if step in (3, 4, 9) and engine.scheduler.running:
            engine.scheduler.lifecycle.preempt(engine.scheduler.running[-1], "for the test")

    assert some.run(engine, preempt) == expected
    assert PREEMPTED in engine.stats().async_scheduling.waited


def test_cancelling_all_requests_leaves_an_idle_engine(model):
    engine = work("greedy").engine(model, asynchronous=True)
    for number in range(3):
        engine.submit(work("greedy").request(number))
    engine.step()
    before = engine.stats()
    engine.step()
    after = engine.stats()
    assert after.async_scheduling.ahead == before.async_scheduling.ahead + 1
    assert after.times.schedule_s > before.times.schedule_s

    for number in range(3):
        engine.cancel(f"r{number}")
    deltas = engine.step()

    assert [delta.finish_reason for delta in deltas] == ["abort"] * 3
    assert not engine.has_work
    engine.check()


def test_id_of_a_cancelled_request_can_be_used_again_at_once(model):
    engine = work("greedy").engine(model, asynchronous=True)

    def submit(options):
        engine.submit(GenerationRequest([3, 4], SamplingParams(**options), request_id="same"))

    submit(GREEDY)
    engine.step()
    engine.step()
    engine.cancel("same")
    deltas = engine.step()
    submit(SHORT)
    while engine.has_work:
        deltas += engine.step()

    assert sum(delta.is_last for delta in deltas) == 2
    assert sum(len(delta.token_ids) for delta in deltas if delta.finish_reason != "abort") >= 5


def test_blocks_of_pending_tokens_are_published_with_their_tokens(model):
    prompt = list(range(40, 53))
    hits = []
    for mode in (False, True):
        engine = work("greedy").engine(model, asynchronous=mode)
        output = Work(prompts=[prompt], params=[GREEDY]).run(engine)[("r0", 0)]
        engine.submit(GenerationRequest(prompt + output.tokens, SamplingParams(**SHORT)))
        before = engine.stats().cached_tokens
        while engine.has_work:
            engine.step()
        hits.append((output.tokens, engine.stats().cached_tokens - before))

    assert hits[0] == hits[1]
    assert hits[0][1] == 24  # 13 + 13 computed tokens, in blocks of 4


def test_async_llm_streams_equal_outputs_and_closes_with_a_step_in_flight(model):
    prompts = make_prompts(3, 9, seed=2)
    same = Work(prompts=prompts, params=[GREEDY, STOP_TEXT])
    expected = same.run(same.engine(model, asynchronous=False))
    engine = same.engine(model, asynchronous=True)

    async def main():
        llm = AsyncLLM(engine)
        outputs = await asyncio.gather(*(llm.generate(same.request(n)) for n in range(3)))
        endless = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
        stream = llm.stream([3, 4, 5], endless)
        await anext(stream)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        return outputs

    outputs = asyncio.run(main())

    found = {(output.request_id, 0): output.choices[0] for output in outputs}
    assert {key: (list(c.token_ids), c.text) for key, c in found.items()} == {
        key: (output.tokens, output.text) for key, output in expected.items()
    }
    assert not engine.has_work
    engine.check()


class Log:
    """Records launches and reads of an engine, and the steps of its runner."""

    def __init__(self, engine, rows):
        self.events, self._rows, self._begun = [], rows, 0
        self._run = engine.runner.run
        self.pending = []
        engine.runner = self
        vocab_size = engine.model.spec.vocab_size
        engine.sampling_step.sampler = Sampler(vocab_size, (1,), read=self.read)

    def run(self, plan):
        self.events.append("launch")
        self.pending.append(sum(r.progress.num_pending for r in plan.requests))
        return self._run(plan)

    def read(self, numbers):
        assert numbers.device.type == DEVICE.type

        def wait():
            self.events.append("read")
            found = np.zeros(numbers.shape)
            found[: self._rows] = 2
            return found

        return wait


def engine_on_a_device(options, *, graphs=False):
    engine = Engine(
        dataless("llama"),
        kv_config(memory="4MiB", page_tokens=4),
        ScheduleConfig(max_num_seqs=8, async_scheduling=True),
    )
    if graphs:
        use_graphs(engine, 8, DEVICE)
    log = Log(engine, len(options))
    for prompt, params in zip(make_prompts(len(options), 9, seed=3), options, strict=True):
        engine.submit(GenerationRequest(prompt, SamplingParams(**params)))
    assert engine.step() == []
    return engine, log


@pytest.mark.parametrize("graphs", [False, True])
def test_step_is_launched_before_the_tokens_of_the_last_step_are_read(graphs):
    options = [{**GREEDY, "max_tokens": 30}, {**SEEDED, "max_tokens": 30}, {**SCORED, "n": 1}]
    if not graphs:
        options.append({**PENALTIES, "ignore_eos": True, "max_tokens": 30})
    engine, log = engine_on_a_device(options, graphs=graphs)

    with recorded_waits() as waits:
        for _ in range(6):
            assert len(engine.step()) == len(options)

    assert waits == []
    assert log.events == ["launch", *["launch", "read"] * 6]
    assert log.pending == [0, *[len(options)] * 6]
    assert engine.stats().async_scheduling.ahead == 6
    if graphs:
        assert engine.decode_graphs.stats.replayed == 6


def tokens_of(outputs):
    return {key: output.tokens for key, output in outputs.items()}


def test_graphs_read_pending_tokens_in_padded_batches(model):
    requests = Work(prompts=make_prompts(9, 12, seed=4), params=[GREEDY, SEEDED, SHORT])
    expected = requests.run(requests.engine(model, asynchronous=False))
    engine = requests.engine(model, asynchronous=True)
    graphs = use_graphs(engine, 6, torch.device("cpu"), required=True)

    found = requests.run(engine)

    assert tokens_of(found) == tokens_of(expected)
    assert graphs.stats.replayed > 10
    assert engine.stats().async_scheduling.ahead > 10


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [None, False])
def test_outputs_on_a_cuda_device_are_equal(graphs):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    on_device = model_with_text("transformers", "cuda")
    some = replace(work("sampling"), schedule={"cuda_graphs": graphs})
    expected = some.run(some.engine(on_device, asynchronous=False))
    engine = some.engine(on_device, asynchronous=True)

    found = some.run(engine)

    assert tokens_of(found) == tokens_of(expected)
    assert engine.stats().async_scheduling.ahead > 10


def fail_at(monkeypatch, owner, method, call, error):
    """Raise an error in one call of a method."""
    original, numbers = getattr(owner, method), count(1)

    def counted(*arguments, **options):
        if next(numbers) == call:
            raise error
        return original(*arguments, **options)

    monkeypatch.setattr(owner, method, counted)


FAILURES = {
    "forward": (Runner, "run"),
    "sampling": (Sampler, "launch"),
    "read": (sampling_step, "waited"),
}


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("call", [1, 2, 5])
def test_failed_step_can_be_repeated(model, monkeypatch, where, call):
    some = work("sampling", number=6)
    expected = some.run(some.engine(model, asynchronous=False))
    engine = some.engine(model, asynchronous=True)
    fail_at(monkeypatch, *FAILURES[where], call, RuntimeError("injected"))
    step, raised = engine.step, []

    def guarded():
        try:
            return step()
        except RuntimeError as error:
            raised.append(str(error))
            assert not any(r.progress.num_pending for r in engine.requests())
            return []

    monkeypatch.setattr(engine, "step", guarded)

    found = some.run(engine)

    assert raised == ["injected"]
    assert found == expected


def test_out_of_memory_ends_the_requests_of_the_failed_step_only(model, monkeypatch):
    two = Work(prompts=make_prompts(2, 5, seed=1), params=[GREEDY, {**GREEDY, "max_tokens": 2}])
    expected = two.run(two.engine(model, asynchronous=False))
    engine = two.engine(model, asynchronous=True)
    # the second request's last token is in flight, and it has no row in the third step
    fail_at(monkeypatch, Runner, "run", 3, torch.OutOfMemoryError("CUDA out of memory"))

    found = two.run(engine)

    assert found[("r0", 0)].reason == "error"
    assert "memory" in found[("r0", 0)].error
    assert found[("r1", 0)] == expected[("r1", 0)]


def test_rows_with_bad_logits_end_with_an_error(model, monkeypatch):
    some = work("greedy", number=4)
    engine = some.engine(model, asynchronous=True)
    numbers, decoder = count(1), type(model.decoder)
    original = decoder.forward

    def spoiled(self, *arguments, **options):
        logits = original(self, *arguments, **options).clone()
        if next(numbers) == 3:
            logits[0] = torch.nan
        return logits

    monkeypatch.setattr(decoder, "forward", spoiled)

    found = some.run(engine)

    assert [output.reason for output in found.values()].count("error") == 1
    assert all(output.reason in ("length", "error") for output in found.values())


def test_replaced_sampler_is_called_synchronously(model):
    class Recorder(Sampler):
        rows = 0

        def sample(self, logits, rows):
            self.rows += len(rows)
            return super().sample(logits, rows)

    some = work("greedy", number=3)
    engine = some.engine(model, asynchronous=True)
    recorder = Recorder(model.spec.vocab_size, ())
    engine.sampling_step.sampler = recorder

    found = some.run(engine)

    assert recorder.rows == sum(len(output.tokens) for output in found.values())
    assert engine.stats().async_scheduling.ahead == 0
    assert async_steps.SAMPLER in engine.stats().async_scheduling.waited


@pytest.mark.parametrize(
    ("kv", "schedule", "reason"),
    [
        ({}, {"batcher": "static"}, "--batcher is set"),
        ({}, {"batch_invariant": True}, "--batch-invariant is set"),
        ({}, {"high_watermark": 0.9, "low_watermark": 0.8}, "--high-watermark is set"),
        ({}, {"scale_down_at": 0.9}, "--scale-down-at is set"),
        ({}, {"tenants": "a; b"}, "--tenants is set"),
        ({}, {"urgent": 0}, "--urgent is set"),
        ({"offload_memory": "1MiB"}, {}, "offloaded KV is transferred"),
        ({"codec": "int8+residual=8"}, {}, "tokens in full precision"),
        ({"disk_memory": "1MiB"}, {}, "loaded from a tier"),
    ],
)
def test_required_asynchronous_scheduling_is_refused_with_the_reason(
    tmp_path, kv, schedule, reason
):
    model = engines.load("llama", times=2)
    if "disk_memory" in kv:
        kv = {**kv, "disk_path": str(tmp_path)}
    one = Work(prompts=[], params=[], kv=kv, schedule=schedule)

    with pytest.raises(ConfigError, match=rf"{reason}.*--no-async-scheduling"):
        one.engine(model, asynchronous=True)

    config = kv_config(memory="1MiB", page_tokens=4, **kv)
    engine = Engine(model, config, ScheduleConfig(**schedule))
    assert engine.stats().async_scheduling is None
    engine.close()


def test_a_shared_pool_ranks_and_offloaded_weights_are_refused(model):
    class TwoRanks(OneRank):
        size = 2

    pool, schedule = SharedPool("2MiB", device="cpu"), ScheduleConfig(async_scheduling=True)

    with pytest.raises(ConfigError, match=r"shared pool.*--no-async-scheduling"):
        Engine(model, kv_config(memory="1MiB"), schedule, pool=pool.join("a", guaranteed="1MiB"))
    with pytest.raises(ConfigError, match="2 ranks"):
        async_steps.refuse_async(replace(model, group=TwoRanks()), schedule, None)
    offloaded = replace(model, weights=Mock(spec=LayerSource))
    with pytest.raises(ConfigError, match="offloaded weights"):
        async_steps.refuse_async(offloaded, schedule, None)


def test_asynchronous_scheduling_is_off_on_a_cpu_unless_required(model):
    found = [
        Engine(model, kv_config(memory="1MiB"), ScheduleConfig(async_scheduling=required)).stats()
        for required in (None, False, True)
    ]
    assert [one.async_scheduling for one in found] == [None, None, async_steps.AsyncStats()]


RANDOM_PARAMS = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 1.2, "stop": ("a", "q", "7")},
    {"temperature": 1.0, "stop_token_ids": (3, 30, 33), "min_tokens": 4},
    {"temperature": 0.0, "frequency_penalty": 1.5},
    {"temperature": 1.0, "structured_outputs": {"regex": "[a-f]{2,9}"}},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": None, "use_beam_search": True, "beam_width": 2},
)


@pytest.fixture(scope="module")
def exact_model():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield model_with_text("transformers")


@st.composite
def works(draw):
    def pick(*values):
        return draw(st.sampled_from(values))

    count = draw(st.integers(2, 8))
    chosen = draw(st.lists(st.sampled_from(RANDOM_PARAMS), min_size=1, max_size=count))
    kv = {
        "memory": pick("20KiB", "24KiB", "32KiB", "512KiB"),
        "attention": "gathered",
        "swap_space": pick(0, "256KiB"),
        "evict": pick("full", "full", "sinks:cap=16,sinks=2,every=4", "h2o:cap=20,every=8"),
        "enable_prefix_caching": draw(st.booleans()),
    }
    least = 8 if kv["evict"].endswith("every=8") else 6  # a step holds what evicts at once
    return Work(
        prompts=make_prompts(count, 20, seed=draw(st.integers(0, 99))),
        params=[{"max_tokens": 16} | params for params in chosen],
        kv=kv,
        schedule={"chunk_tokens": pick(4, 64), "max_num_batched_tokens": pick(least, 64)},
        wave=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 6)),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    works(),
    st.dictionaries(st.integers(1, 40), st.integers(0, 7), max_size=2),
    st.sets(st.integers(1, 40), max_size=2),
)
def test_random_requests_have_equal_outputs(exact_model, work, cancelled, preempted):
    expected = work.run(work.engine(exact_model, asynchronous=False))
    engine = work.engine(exact_model, asynchronous=True)

    def disturb(step):
        if step in cancelled:
            engine.cancel(f"r{cancelled[step]}")
        if step in preempted and engine.scheduler.running:
            engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "for the test")

    found = work.run(engine, disturb)

    assert {name for name, _ in found} == {name for name, _ in expected}
    check_cancelled(found, expected, {f"r{number}" for number in cancelled.values()})
    assert not engine.has_work


# ---- steps on a device ---------------------------------------------------------------------------


OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top_k": SamplingParams(temperature=1.0, top_k=5),
    "top_p": SamplingParams(temperature=1.0, top_p=0.9),
    "min_p": SamplingParams(temperature=1.0, min_p=0.1),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "masks": SamplingParams(temperature=0, min_tokens=8, logit_bias={3: 1}, bad_token_ids=((4,),)),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(3, 4, 5)),
    "logprobs": SamplingParams(temperature=1.0, logprobs=3),
}


GREEDY_NUMBERS = 3
"""Numbers that are read of a greedy row."""


class Reads:
    """Stands for the copy of the results from the device; returns token 2 for every row.

    Attributes:
        rows: rows of each step; 0: read from the copy, of greedy rows.
        count: number of waits for a copy.
        begun: number of copies that have begun.
    """

    def __init__(self):
        self.rows = self.count = self.begun = 0

    def __call__(self, numbers):
        self.begun += 1
        assert numbers.device.type == DEVICE.type

        def wait():
            self.count += 1
            found = np.zeros(numbers.shape)
            found[: self.rows or len(found) // GREEDY_NUMBERS] = 2
            return found

        return wait


def decoding_engine(architecture, reads, options, **kv):
    model = dataless(architecture)
    config = kv_config(memory="4MiB", page_tokens=4, **kv)
    engine = Engine(model, config, ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=1024))
    engine.sampling_step.sampler = Sampler(model.spec.vocab_size, (1,), read=reads)
    reads.rows = 0 if "evict" in kv else len(options)
    prompts = make_prompts(len(options), 9, seed=3)
    if "evict" in kv:  # rows that evict in the same step
        prompts = [[3 + row % 90] * 9 for row in range(len(options))]
    for prompt, params in zip(prompts, options, strict=True):
        engine.submit(GenerationRequest(prompt, params))
    while {request.num_uncomputed for request in engine.scheduler.running} != {1}:
        engine.step()
    reads.count = 0
    return engine


def check_waits(engine, reads, steps=6, rows=3):
    """Check that each step waits once, for its tokens; six steps cross a page."""
    with recorded_waits() as waits:
        for _ in range(steps):
            assert len(engine.step()) == rows
    assert waits == []
    assert reads.count == steps


@pytest.mark.parametrize("name", OPTIONS)
def test_decode_step_on_a_device_waits_once_for_its_tokens(name):
    reads = Reads()
    check_waits(decoding_engine("llama", reads, [OPTIONS[name]] * 3), reads)


RULES = {
    "recent": "recent:sinks=2",
    "sinks": "sinks:sinks=2",
    "average": "average:recent=2",
    "snapkv": "snapkv:window=2",
    "value_norm": "value_norm:base=h2o",
    "criticalkv": "criticalkv:base=h2o",
    **{name: f"{name}:" for name in ("h2o", "tova", "keydiff", "knorm", "random", "kvcrush")},
}


def with_cap(rule):
    return f"{rule}{'' if rule.endswith(':') else ','}cap=12,every=4"


def evicting_engine(rule, rows, reads, monkeypatch):
    monkeypatch.setattr(decisions, "start_read", lambda numbers: lambda: numbers_of(numbers))
    engine = decoding_engine("llama", reads, [OPTIONS["greedy"]] * rows, evict=with_cap(rule))
    while len(engine.step()) < rows:
        pass
    reads.count = 0
    return engine


def numbers_of(numbers):
    """What a rule without a breach evicts, in the shape of a tensor on the device."""
    return np.zeros(numbers.shape, dtype=bool if numbers.dtype == torch.bool else np.int64)


@pytest.mark.parametrize("name", RULES)
def test_step_that_evicts_waits_once_for_its_tokens(name, monkeypatch):
    reads = Reads()
    engine = evicting_engine(RULES[name], 3, reads, monkeypatch)
    check_waits(engine, reads, steps=10)
    assert engine.scheduler.capacities.num_evictions >= 3


class CountsOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of_an_eviction(rule, rows, monkeypatch):
    """Tensor operations that evict from rows that reach their cap in the same step."""
    counts = []
    inner = LaneCapacities.evict_to_capacity

    def counted(self, requests):
        with CountsOperations() as operations:
            before = self.num_evictions
            found = inner(self, requests)
        if self.num_evictions - before == rows:
            counts.append(operations.count)
        return found

    monkeypatch.setattr(LaneCapacities, "evict_to_capacity", counted)
    engine = evicting_engine(rule, rows, Reads(), monkeypatch)
    while not counts:
        engine.step()
    return counts[0]


@pytest.mark.parametrize("name", RULES)
def test_operations_of_an_eviction_do_not_grow_with_the_rows(name, monkeypatch):
    counts = {operations_of_an_eviction(RULES[name], rows, monkeypatch) for rows in (1, 64)}
    assert len(counts) == 1, counts


class CountsLaunches(CountsOperations):
    """Counts calls of kernels, and torch operations that are neither views nor allocations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        makes = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty)
        self.count += not (func.is_view or makes)
        return func(*args, **(kwargs or {}))

    def of(self, launch, number):
        """A function that counts as this number, with what it does."""

        def counted(*args):
            self.count += number
            with torch._C._DisableTorchDispatch():
                return launch(*args)

        return counted


SELECTORS = {"native": lambda: NativeAttention(load_library(), GatheredAttention(CPU))}
if why_no_triton(CPU) is None:
    SELECTORS["triton"] = triton_backend
LAUNCHING = {
    **dict.fromkeys(("order_lanes", "select_lanes", "move_lanes", "move"), 1),
    **dict.fromkeys(("window_sums", "mean_cosines"), 2),
}
"""Each is one call of the C library, and this number of launches with Triton."""
MAX_LAUNCHES = 12


def launches_of_an_eviction(form, rule, rows, monkeypatch):
    """Launches that evict from rows that reach their cap in the same step."""
    found, launches, inner = [], CountsLaunches(), LaneCapacities.evict_to_capacity
    config = kv_config(memory="8MiB", page_tokens=4, evict=with_cap(rule))
    schedule = ScheduleConfig(max_num_seqs=64, max_num_batched_tokens=1024)
    engine = Engine(engines.load("qwen3"), config, schedule)
    attending, evicting = engine.pool.kv.backend, SELECTORS[form]()
    for name, number in LAUNCHING.items():
        counted = launches.of(getattr(evicting, name), number if form == "triton" else 1)
        monkeypatch.setattr(evicting, name, counted)

    def evict_to_capacity(self, requests):
        before, launches.count, engine.pool.kv.backend = self.num_evictions, 0, evicting
        with launches, monkeypatch.context() as patch:
            if form == "triton":  # as on a GPU
                patch.setattr(device_copies, "reads_freely", lambda device: False)
            evicted = inner(self, requests)
        engine.pool.kv.backend = attending
        if self.num_evictions - before == rows:
            found.append(launches.count)
        return evicted

    monkeypatch.setattr(LaneCapacities, "evict_to_capacity", evict_to_capacity)
    options = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for row in range(rows):
        engine.submit(GenerationRequest([3 + row % 90] * 9, options))
    while not found:
        engine.step()
    return found[0]


@pytest.mark.parametrize(
    ("form", "rows"), [("native", (1, 64)), pytest.param("triton", (1, 8), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["recent", "sinks", "h2o", "average", "keydiff", "snapkv", "tova"])
def test_evictions_of_any_number_of_rows_take_few_launches(form, rows, name, monkeypatch):
    if form not in SELECTORS:
        pytest.skip("no interpreter of Triton")
    counts = [launches_of_an_eviction(form, RULES[name], number, monkeypatch) for number in rows]
    assert counts[0] == counts[1] <= MAX_LAUNCHES


def test_decode_steps_of_any_options_and_static_inputs_wait_once():
    reads, options = Reads(), list(OPTIONS.values())[:8]
    check_waits(decoding_engine("llama", reads, options), reads, steps=1, rows=8)
    reads = Reads()
    engine = decoding_engine("llama", reads, [OPTIONS["greedy"]] * 3)
    graphs = use_graphs(engine, 8, DEVICE)
    check_waits(engine, reads)
    assert graphs.stats.replayed == 6


ARCHITECTURES = ("llama_mqa", "mistral", "qwen2_window", "qwen3", "gemma2", "gpt2", "opt")


@pytest.mark.parametrize(
    ("architecture", "codec"),
    [*((name, "none") for name in ARCHITECTURES), *(("llama", c) for c in ("int8", "int4", "fp8"))],
)
def test_decode_step_of_any_architecture_and_codec_waits_once(architecture, codec):
    reads = Reads()
    check_waits(decoding_engine(architecture, reads, [OPTIONS["greedy"]] * 3, codec=codec), reads)


@pytest.mark.slow
def test_steps_that_reallocate_page_tables_wait_once():
    reads = Reads()
    options = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    engine = decoding_engine("llama", reads, [options] * 3)
    tables = engine.pool.kv.tables.values()
    before = [table.current().shape[2] for table in tables]

    check_waits(engine, reads, steps=60)  # more than 16 pages of 4 tokens

    assert all(t.current().shape[2] > width for t, width in zip(tables, before, strict=True))


def test_reads_and_blocking_copies_are_recorded():
    numbers = torch.zeros(4, device=DEVICE)

    with recorded_waits() as waits:
        for read in (numbers.tolist, numbers.cpu, numbers.nonzero, numbers[0].item):
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()
        with pytest.raises((RuntimeError, NotImplementedError)):
            bool((numbers > 0).all())

    scalar = "aten._local_scalar_dense.default"
    assert waits == ["aten.nonzero.default", scalar, scalar]
    with recorded_waits() as waits:
        torch.from_numpy(np.zeros(4)).to(DEVICE)
        torch.zeros(4, device=DEVICE).copy_(torch.zeros(4))
    assert waits == ["aten._to_copy.default between devices", "aten.copy_.default between devices"]
