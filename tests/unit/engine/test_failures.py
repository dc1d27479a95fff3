from dataclasses import replace
from itertools import count

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from quire import GenerationRequest, KVConfig, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.engine.runner import Runner
from quire.errors import PolicyError, RequestError
from quire.eviction.eviction import PolicyEvictor
from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel
from quire.sampling.sampler import Sampler
from support import engines
from support.pairwise import every_pair

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12]]


def small_engine(model: LoadedModel) -> Engine:
    schedule = ScheduleConfig(max_num_seqs=2)
    return Engine(model, KVConfig(memory="96KiB", page_tokens=4), schedule)


def submit_all(engine: Engine) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(GenerationRequest(prompt, engines.greedy(), request_id=f"r{i}"))


def submit_beams(engine: Engine) -> None:
    beams = SamplingParams(n=3, max_tokens=12, use_beam_search=True, ignore_eos=True)
    engine.submit(GenerationRequest([3, 4, 5, 6], beams, request_id="beams"))
    engine.submit(GenerationRequest([7, 8], engines.greedy(12), request_id="other"))


def finish(engine: Engine, tokens: dict[str, list[int]]) -> dict[str, str]:
    errors = {}
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.error is not None:
                assert delta.finish_reason == "error"
                errors[delta.request_id] = delta.error
    engine.check()
    return errors


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


@pytest.fixture(scope="module")
def expected(model):
    engine, tokens = small_engine(model), {}
    submit_all(engine)
    assert not finish(engine, tokens)
    return tokens


def fail_once(monkeypatch, component: str, at_call: int, error: BaseException) -> None:
    """Raise `error` in the call with this number (from 1) of the decoder or the sampler."""
    owners = {"decoder": (TransformersDecoder, "forward"), "sampler": (Sampler, "sample")}
    owner, method = owners[component]
    original, numbers = getattr(owner, method), count(1)

    def counted(*arguments, **options):
        fails = next(numbers) == at_call
        if fails and component == "sampler":
            raise error
        result = original(*arguments, **options)
        if fails:
            raise error  # a late failure: KV of all layers has been written
        return result

    monkeypatch.setattr(owner, method, counted)


@every_pair(
    component=["decoder", "sampler"],
    at_call=[1, 3],
    error=[torch.OutOfMemoryError("CUDA out of memory"), MemoryError()],
)
def test_out_of_memory_fails_the_requests_of_the_step_only(
    monkeypatch, model, expected, component, at_call, error
):
    engine, tokens = small_engine(model), {}
    fail_once(monkeypatch, component, at_call, error)
    submit_all(engine)

    errors = finish(engine, tokens)

    assert errors.keys() == {"r0", "r1"}  # the two running requests
    assert all("--max-num-batched-tokens" in text for text in errors.values())
    assert all(tokens[key] == expected[key] for key in ("r2", "r3"))
    assert tokens["r0"] == expected["r0"][: at_call - 1]


def test_out_of_memory_error_of_the_cpu_allocator_is_recognized(monkeypatch, model):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    engine = small_engine(model)
    fail_once(monkeypatch, "decoder", 1, caught.value)
    engine.submit(GenerationRequest([3], engines.greedy()))

    assert "can't allocate memory" in engine.step()[0].error
    engine.check()


@pytest.mark.parametrize("component", ["decoder", "sampler"])
@pytest.mark.parametrize("at_call", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_step_can_be_repeated_after_any_other_error(
    monkeypatch, model, expected, component, at_call, error
):
    engine, tokens = small_engine(model), {}
    fail_once(monkeypatch, component, at_call, error)
    submit_all(engine)

    with pytest.raises(type(error)):
        finish(engine, tokens)
    engine.pool.kv.memory.check()
    assert not finish(engine, tokens)

    assert tokens == expected


def test_deltas_from_before_an_error_are_returned_by_the_next_step(monkeypatch, model):
    engine, tokens = small_engine(model), {}
    fail_once(monkeypatch, "decoder", 2, RuntimeError("a bug"))
    submit_all(engine)
    engine.step()
    engine.cancel("r0")
    with pytest.raises(RuntimeError):
        engine.step()
    for request_id in ("r1", "r2", "r3"):
        engine.cancel(request_id)

    last = [delta.request_id for delta in engine.step() if delta.finish_reason == "abort"]
    assert last == ["r0", "r1", "r2", "r3"]
    assert not finish(engine, tokens)


def test_rejected_request_ids_and_failing_tokenizers_leave_no_work_queued(model):
    engine, tokens = small_engine(model), {}
    other = small_engine(model)
    other.submit(GenerationRequest([3], engines.greedy(), request_id="request-2"))
    assert other.submit(GenerationRequest([3], engines.greedy())) != "request-2"
    two_outputs = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    engine.submit(GenerationRequest([3], engines.greedy(), request_id="r#1"))
    with pytest.raises(RequestError, match="request id 'r#1' is in use"):
        engine.submit(GenerationRequest([4], two_outputs, request_id="r"))
    engine.submit(GenerationRequest([3], engines.greedy(), request_id="request-3#1"))
    generated_id = engine.submit(GenerationRequest([4], two_outputs))

    assert generated_id != "request-3"
    assert not finish(engine, tokens)
    assert tokens.keys() == {"r#1", "request-3#1", generated_id}

    class FailingTokenizer(PreTrainedTokenizerBase):
        def decode(self, *_arguments, **_options):
            raise OverflowError("no such id")

    engine = small_engine(replace(model, tokenizer=FailingTokenizer()))
    with pytest.raises(OverflowError):
        engine.submit(GenerationRequest([3, 4], engines.greedy()))

    assert not engine.has_work


def test_rejected_request_does_not_replace_a_recorded_eviction_trace(model):
    config = KVConfig(memory="96KiB", page_tokens=4, evict="recent:cap=8,every=2")
    engine = Engine(model, config, ScheduleConfig(max_num_seqs=2))
    options = {"request_id": "r", "record_evictions": True}
    engine.submit(GenerationRequest([3] * 12, engines.greedy(), **options))
    finish(engine, {})
    trace = engine.eviction_trace("r")
    beams = SamplingParams(n=4, max_tokens=40, use_beam_search=True)
    with pytest.raises(RequestError):
        engine.submit(GenerationRequest([3] * 60, beams, **options))

    assert trace
    found = [step.num_computed for step in engine.eviction_trace("r")]
    assert found == [step.num_computed for step in trace]


def test_policy_error_for_one_beam_ends_all_beams_before_the_step_runs(monkeypatch):
    """The step was planned with all beams: without rows they would write to other rows."""
    config = KVConfig(memory="2MiB", page_tokens=4, evict="recent:cap=8,every=2")
    engine = Engine(engines.load("llama"), config, ScheduleConfig(max_num_seqs=4))
    evict, run, failed = PolicyEvictor.evict, Runner.run, []

    def fail_for_one_beam(evictor, request, keep, *, min_gain=None):
        if request.request_id.startswith("beams") and not failed:
            failed.append(request)
            raise PolicyError("broken on purpose")
        return evict(evictor, request, keep, min_gain=min_gain)

    def run_rows(runner, plan):
        assert all(request.memory.row >= 0 for request in plan.requests)
        return run(runner, plan)

    monkeypatch.setattr(PolicyEvictor, "evict_together", lambda evictor, due: [None] * len(due))
    monkeypatch.setattr(PolicyEvictor, "evict", fail_for_one_beam)
    monkeypatch.setattr(Runner, "run", run_rows)
    submit_beams(engine)

    tokens: dict[str, list[int]] = {}
    errors = finish(engine, tokens)

    assert failed
    assert errors.keys() == {"beams"}
    assert len(tokens["other"]) == 12
    engine.check()


@pytest.mark.parametrize("at_fork", [1, 2, 6])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("a bug")]
)
def test_failed_fork_ends_its_beam_search_only(model, monkeypatch, error, at_fork):
    """The fork fails while the beams are exchanged, after the next token was sampled."""
    config = KVConfig(memory="2MiB", page_tokens=4)
    engine = Engine(model, config, ScheduleConfig(max_num_seqs=4))
    sequence_memory, forks = engine.scheduler.sequence_memory, []
    fork = sequence_memory.fork

    def fail_at_fork(parent, child):
        forks.append(child)
        if len(forks) == at_fork:
            raise error
        fork(parent, child)

    monkeypatch.setattr(sequence_memory, "fork", fail_at_fork)
    submit_beams(engine)

    tokens: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    try:
        errors |= finish(engine, tokens)
    except RuntimeError:
        errors |= finish(engine, tokens)

    assert len(forks) == at_fork
    assert "beams could not be copied" in errors["beams"]
    assert len(tokens["other"]) == 12 or "other" in errors
    assert len(engine.pool.kv.memory.live_rows) == 0
