"""Steps that fail: what ends with an error, what goes on, and that nothing is left behind."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import PolicyError, RequestError
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12]]


class Breaking:
    """Stands in for a part of the engine, and raises at one call."""

    def __init__(self, part, at_call, error):
        self._part, self._left, self._error = part, at_call, error

    def __getattr__(self, name):
        return getattr(self._part, name)

    def _call(self, method, *arguments, **options):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return method(*arguments, **options)

    def forward(self, *arguments, **options):
        result = self._part.forward(*arguments, **options)  # what fails late has done most
        return self._call(lambda: result)

    def sample(self, *arguments):
        return self._call(self._part.sample, *arguments)


def cpu_is_full() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


def small_engine(model: LoadedModel) -> Engine:
    schedule = ScheduleConfig(max_num_seqs=2)
    return Engine(model, KVConfig(memory="96KiB", page_tokens=4), schedule)


def submit_all(engine: Engine) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(GenerationRequest(prompt, engines.greedy(), request_id=f"r{i}"))


def finish(engine: Engine, tokens: dict[str, list[int]]) -> dict[str, str]:
    """Run to the end, adding to `tokens`; why each request failed, for those that did."""
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


def break_part(engine: Engine, part: str, at_call: int, error: BaseException) -> None:
    if part == "sampler":
        engine._sampling_step.sampler = Breaking(engine._sampling_step.sampler, at_call, error)
    else:
        engine._runner._decoder = Breaking(engine._runner._decoder, at_call, error)


@pytest.mark.parametrize("part", ["decoder", "sampler"])
@pytest.mark.parametrize("at_call", [1, 3])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_requests_of_a_step_without_memory_fail_and_the_others_go_on(
    model, expected, part, at_call, error
):
    engine, tokens = small_engine(model), {}
    break_part(engine, part, at_call, error)
    submit_all(engine)

    errors = finish(engine, tokens)

    assert errors.keys() == {"r0", "r1"}  # the two that ran
    assert all("--max-num-batched-tokens" in text for text in errors.values())
    assert {key: tokens[key] for key in ("r2", "r3")} == {
        key: expected[key] for key in ("r2", "r3")
    }
    assert tokens["r0"] == expected["r0"][: at_call - 1]


def test_the_cpu_allocators_error_is_known(model):
    engine = small_engine(model)
    break_part(engine, "decoder", 1, cpu_is_full())
    engine.submit(GenerationRequest([3], engines.greedy()))

    assert "can't allocate memory" in engine.step()[0].error
    engine.check()


@pytest.mark.parametrize("part", ["decoder", "sampler"])
@pytest.mark.parametrize("at_call", [1, 3])
@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()])
def test_after_any_other_error_the_engine_goes_on_as_if_nothing_had_happened(
    model, expected, part, at_call, error
):
    engine, tokens = small_engine(model), {}
    break_part(engine, part, at_call, error)
    submit_all(engine)

    with pytest.raises(type(error)):
        finish(engine, tokens)
    engine.pool.kv.memory.check()
    assert not finish(engine, tokens)

    assert tokens == expected


def test_what_was_said_before_an_error_is_not_lost(model):
    engine, tokens = small_engine(model), {}
    break_part(engine, "decoder", 2, RuntimeError("a bug"))
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


def test_a_request_whose_text_cannot_be_followed_leaves_nothing_behind(model):
    class NoDecoder:
        def decode(self, *_arguments, **_options):
            raise OverflowError("no such id")

    engine = small_engine(model)
    object.__setattr__(engine.model, "tokenizer", NoDecoder())
    with pytest.raises(OverflowError):
        engine.submit(GenerationRequest([3, 4], engines.greedy()))
    object.__setattr__(engine.model, "tokenizer", None)

    assert not engine.has_work


def test_an_id_the_engine_chooses_is_nobody_elses(model):
    engine = small_engine(model)
    engine.submit(GenerationRequest([3], engines.greedy(), request_id="request-2"))

    assert engine.submit(GenerationRequest([3], engines.greedy())) != "request-2"


def test_an_id_whose_sequences_would_take_the_id_of_another_request_is_refused(model):
    engine, tokens = small_engine(model), {}
    several = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    engine.submit(GenerationRequest([3], engines.greedy(), request_id="r#1"))
    with pytest.raises(RequestError, match="request id 'r#1' is in use"):
        engine.submit(GenerationRequest([4], several, request_id="r"))
    engine.submit(GenerationRequest([3], engines.greedy(), request_id="request-3#1"))
    chosen = engine.submit(GenerationRequest([4], several))

    assert chosen != "request-3"
    assert not finish(engine, tokens)
    assert tokens.keys() == {"r#1", "request-3#1", chosen}


def test_a_refused_request_takes_no_place_among_the_recorded_ones(model):
    config = KVConfig(memory="96KiB", page_tokens=4, evict="recent:cap=8,every=2")
    engine = Engine(model, config, ScheduleConfig(max_num_seqs=2))
    again = {"request_id": "r", "record_evictions": True}
    engine.submit(GenerationRequest([3] * 12, engines.greedy(), **again))
    finish(engine, {})
    left = engine.eviction_trace("r")
    with pytest.raises(RequestError):
        engine.submit(
            GenerationRequest(
                [3] * 60,
                SamplingParams(n=4, max_tokens=40, use_beam_search=True),
                **again,
            )
        )

    assert left
    assert [step.num_computed for step in engine.eviction_trace("r")] == [
        step.num_computed for step in left
    ]


def test_a_policy_that_fails_for_one_beam_ends_the_search_before_any_beam_is_processed(monkeypatch):
    """The others had been planned: without rows they would be written into somebody else's."""
    engine = Engine(
        engines.load("llama"),
        KVConfig(memory="2MiB", page_tokens=4, evict="recent:cap=8,every=2"),
        ScheduleConfig(max_num_seqs=4),
    )
    evictor, run, failed = engine.scheduler.capacities._evictor, engine._runner.run, []
    evict = evictor.evict

    def break_once(request, keep, *, least_gain=None):
        if request.request_id.startswith("beams") and not failed:
            failed.append(request)
            raise PolicyError("broken on purpose")
        return evict(request, keep)

    def run_rows(plan):
        assert all(request.memory.row >= 0 for request in plan.requests)
        return run(plan)

    monkeypatch.setattr(evictor, "evict", break_once)
    monkeypatch.setattr(engine._runner, "run", run_rows)
    beams = SamplingParams(n=3, max_tokens=12, use_beam_search=True, ignore_eos=True)
    engine.submit(GenerationRequest([3, 4, 5, 6], beams, request_id="beams"))
    engine.submit(GenerationRequest([7, 8], engines.greedy(12), request_id="other"))

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
def test_a_search_ends_where_its_beams_cannot_be_copied_and_the_others_go_on(
    model, monkeypatch, error, at_fork
):
    """The search has gone on to the next token, and its beams are half exchanged."""
    config = KVConfig(memory="2MiB", page_tokens=4)
    engine = Engine(model, config, ScheduleConfig(max_num_seqs=4))
    sequence_memory, num_forks = engine.scheduler.sequence_memory, 0
    fork = sequence_memory.fork

    def break_once(parent, child):
        nonlocal num_forks
        num_forks += 1
        if num_forks == at_fork:
            raise error
        fork(parent, child)

    monkeypatch.setattr(sequence_memory, "fork", break_once)
    beams = SamplingParams(n=3, max_tokens=12, use_beam_search=True, ignore_eos=True)
    engine.submit(GenerationRequest([3, 4, 5, 6], beams, request_id="beams"))
    engine.submit(GenerationRequest([7, 8], engines.greedy(12), request_id="other"))

    tokens: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    try:
        errors |= finish(engine, tokens)
    except RuntimeError:
        errors |= finish(engine, tokens)

    assert num_forks == at_fork
    assert "beams could not be copied" in errors["beams"]
    assert len(tokens["other"]) == 12 or "other" in errors
    assert len(engine.pool.kv.memory.live_rows) == 0
