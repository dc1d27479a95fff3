"""DynamicBatch with eviction, codecs, shared prompts, n, stop texts and log-probabilities.

Dense rows against a run alone and against the engine; paged rows against an engine with the same
options.
"""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import RequestError
from quire.hf import DynamicBatch
from quire.hf.dynamic.query import QueryState
from quire.kv.dense.slab import DenseSlab
from quire.models.loader import load_model
from quire.models.source import find_model
from quire.sampling.outputs import OutputBuilder
from quire.scheduler.schedule_config import ScheduleConfig
from support.dynamic import CHANGING, RULES, build, check_empty
from support.engines import load, make_prompts
from support.kv_options import kv_config

PROMPTS = make_prompts(5, 60, seed=5)
PAGED = [rule for rule in RULES if rule != "baton"]
NEW = 12


def of_engine(prompts, params, *, model="llama", batcher="continuous", **options):
    """Outputs of an engine, by prompt."""
    loaded = model if not isinstance(model, str) else load(model)
    config = kv_config(memory="16MiB", **options)
    engine = Engine(loaded, config, ScheduleConfig(batcher=batcher, max_num_seqs=4))
    builders, outputs = {}, {}
    for prompt in prompts:
        request = GenerationRequest(prompt, params)
        request_id = engine.submit(request)
        builders[request_id] = OutputBuilder(request_id, tuple(prompt), request)
    while engine.has_work:
        for delta in engine.step():
            output = builders[delta.request_id].add(delta)
            if output is not None:
                outputs[delta.request_id] = output
    return [outputs[request_id] for request_id in builders]


def run(batch, prompts, params):
    handles = [batch.submit(prompt, sampling=params) for prompt in prompts]
    batch.run()
    return handles


def check_choices(handles, outputs):
    for handle, output in zip(handles, outputs, strict=True):
        assert [choice.token_ids for choice in handle.choices] == [
            list(choice.token_ids) for choice in output.choices
        ]
        assert [choice.finish_reason for choice in handle.choices] == [
            choice.finish_reason for choice in output.choices
        ]


GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)


# ---- paged rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batcher", [*PAGED, "continuous"])
def test_eviction_and_codecs_give_the_tokens_of_the_engine(batcher):
    rule, codec = "h2o:recent=8,cap=24,every=8", "int8"
    expected = of_engine(PROMPTS, GREEDY, evict=rule, codec=codec)
    options = {"policy": rule, "codec": codec, "batch_size": 2, "batcher": batcher}
    with DynamicBatch(build("llama"), **options) as batch:
        handles = run(batch, PROMPTS, GREEDY)
        assert batch.device_meter.used_bytes == 0

    check_choices(handles, expected)


@pytest.mark.parametrize(
    ("name", "policy", "codec"),
    [
        ("gemma3", "snapkv:window=6,cap=24,every=8,when=prefill_end", "none"),
        ("llama", "streaming:sinks=2,cap=24,every=8", "none"),
        ("llama", "full", "int4+residual=8"),
        ("gpt2", "recent:cap=24,every=8", "int8/int4"),
    ],
)
def test_rules_and_models_give_the_tokens_of_the_engine(name, policy, codec):
    expected = of_engine(PROMPTS, GREEDY, model=name, evict=policy, codec=codec)
    with DynamicBatch(build(name), policy=policy, codec=codec, batch_size=3) as batch:
        check_choices(run(batch, PROMPTS, GREEDY), expected)


def test_prompts_with_a_common_start_share_its_pages():
    shared = [3 + i * i % 60 for i in range(96)]
    prompts = [[*shared, i, 7] for i in range(2, 6)]
    peaks = []
    for rows in (prompts, [[p + 1 for p in prompt[:-2]] + prompt[-2:] for prompt in prompts]):
        varied = [[(t + 9 * i) % 60 + 3 for t in row] for i, row in enumerate(rows)]
        for found in (rows, varied):
            with DynamicBatch(build("llama"), rows="paged", batch_size=4) as batch:
                handles = run(batch, found, GREEDY)
                peaks.append(batch.device_meter.peak_bytes)
            check_choices(handles, of_engine(found, GREEDY))

    assert peaks[0] < 0.6 * peaks[1]


def test_a_small_kv_memory_preempts_and_changes_no_tokens():
    expected = of_engine(PROMPTS, GREEDY)
    with DynamicBatch(build("llama"), rows="paged", scale_at="192KiB", page_tokens=4) as batch:
        handles = run(batch, PROMPTS, GREEDY)

    check_choices(handles, expected)


def test_cancelled_and_preempted_queries_leave_the_others_unchanged():
    expected = of_engine(PROMPTS, GREEDY)
    with DynamicBatch(build("llama"), rows="paged", batch_size=3) as batch:
        handles = [batch.submit(prompt, sampling=GREEDY) for prompt in PROMPTS]
        for _ in range(3):
            batch.step()
        batch.cancel(handles[0])
        running = next(handle for handle in handles if handle.state is QueryState.RUNNING)
        batch.preempt(running)
        assert running.state is QueryState.WAITING
        batch.run()
        with pytest.raises(RequestError, match="rows='dense'"):
            batch.extract(handles[1])

    assert handles[0].finish_reason == "cancelled"
    assert running.preemptions == 1
    check_choices(handles[1:], expected[1:])


def test_the_model_is_restored_when_the_batch_is_closed():
    model = build("llama")
    forward = model.forward
    with DynamicBatch(model, policy="recent:cap=24") as batch:
        batch.submit(PROMPTS[0], 2)
        batch.run()

    assert model.forward == forward
    assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape == (1, 5)


def test_beams_best_of_and_prompt_log_probabilities_need_paged_rows():
    for params in (
        SamplingParams(max_tokens=6, n=2, use_beam_search=True, beam_width=3),
        SamplingParams(max_tokens=6, n=2, best_of=4, seed=3, temperature=1.0),
        SamplingParams(max_tokens=6, prompt_logprobs=2, temperature=0),
    ):
        expected = of_engine(PROMPTS[:2], params)
        with DynamicBatch(build("llama"), rows="paged") as batch:
            handles = run(batch, PROMPTS[:2], params)
        check_choices(handles, expected)
        for handle, output in zip(handles, expected, strict=True):
            assert handle.score == pytest.approx(output.score, abs=1e-4)
            ours, theirs = handle.prompt_logprobs or (), output.prompt_logprobs or ()
            assert [x and x.logprob for x in ours] == [
                x and pytest.approx(x.logprob, abs=1e-4) for x in theirs
            ]


# ---- n -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["dense", "paged"])
@pytest.mark.parametrize("batcher", RULES)
def test_completions_of_a_prompt_are_those_of_the_engine(rows, batcher):
    if rows == "paged" and batcher == "baton":
        pytest.skip("vector shaping needs dense rows")
    params = SamplingParams(max_tokens=NEW, n=3, temperature=0.9, seed=11, ignore_eos=True)
    expected = of_engine(PROMPTS[:3], params)
    with DynamicBatch(build("llama"), rows=rows, batch_size=2, batcher=batcher) as batch:
        handles = run(batch, PROMPTS[:3], params)

    check_choices(handles, expected)
    if rows == "dense":
        check_empty(batch)


@pytest.mark.parametrize("how", [{}, {"prefill": "async"}, {"queue": "host", "prefill": "async"}])
def test_the_prompt_of_several_completions_is_prefilled_once(how):
    params = SamplingParams(max_tokens=4, n=4, temperature=0.9, seed=1, ignore_eos=True)
    batch = DynamicBatch(build("llama"), batch_size=2, **how)
    for prompt in PROMPTS[:2]:
        batch.submit(prompt, sampling=params)
    reads = 0
    while batch.has_work:
        batch.step()
        reads += sum(read.rows for read in batch.last.reads if not read.seen)
    check_empty(batch)

    assert reads == 2


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_one_completion_leaves_the_others(steps):
    params = SamplingParams(max_tokens=NEW, n=3, temperature=0.9, seed=11, ignore_eos=True)
    expected = of_engine(PROMPTS[:1], params)[0]
    batch = DynamicBatch(build("llama"), batch_size=2)
    handle = batch.submit(PROMPTS[0], sampling=params)
    assert batch.num_queued == 3
    for _ in range(steps):
        batch.step()
    batch.cancel(handle)
    batch.run()
    check_empty(batch)

    assert handle.finish_reason == "cancelled"
    for index in (1, 2):
        assert handle.choices[index].token_ids == list(expected.choices[index].token_ids)


def test_a_failed_step_loses_no_completion(monkeypatch):
    params = SamplingParams(max_tokens=NEW, n=3, temperature=0.9, seed=11, ignore_eos=True)
    expected = of_engine(PROMPTS[:1], params)
    batch = DynamicBatch(build("llama"), batch_size=2)
    handle = batch.submit(PROMPTS[0], sampling=params)
    for failing in ("extract", "begin"):
        with monkeypatch.context() as patch:
            patch.setattr(DenseSlab, failing, fail)
            with pytest.raises(MemoryError):
                batch.run()
    batch.run()
    check_empty(batch)

    check_choices([handle], expected)


def fail(*_arguments, **_options):
    raise MemoryError("no memory")


# ---- text and log-probabilities ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    folder, _ = find_model("quire-tiny")
    loaded = load_model(folder, dtype="float32")
    return loaded, folder


def own_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("rows", ["dense", "paged"])
def test_stop_texts_end_outputs_as_in_the_engine(rows, tiny):
    loaded, folder = tiny
    prompts = [loaded.tokenizer.encode(f"<|doc|>The {word}") for word in ("city", "river", "king")]
    plain = of_engine(prompts, SamplingParams(max_tokens=24, temperature=0), model=loaded)
    stop = tuple({output.text[6:9] for output in plain if len(output.text) > 9})
    params = SamplingParams(max_tokens=24, temperature=0, stop=stop)
    expected = of_engine(prompts, params, model=loaded)
    options = {"rows": rows, "tokenizer": loaded.tokenizer, "batch_size": 2}
    with DynamicBatch(own_model(folder), **options) as batch:
        handles = run(batch, prompts, params)

    check_choices(handles, expected)
    assert [handle.text for handle in handles] == [output.text for output in expected]
    assert [handle.stop_reason for handle in handles] == [o.stop_reason for o in expected]
    assert any(handle.stop_reason in stop for handle in handles)


@pytest.mark.parametrize("rows", ["dense", "paged"])
@pytest.mark.parametrize("batcher", CHANGING)
def test_log_probabilities_are_those_of_the_engine(rows, batcher):
    if rows == "paged" and batcher == "baton":
        pytest.skip("vector shaping needs dense rows")
    params = SamplingParams(max_tokens=NEW, temperature=0, logprobs=2, ignore_eos=True)
    expected = of_engine(PROMPTS, params)
    with DynamicBatch(build("llama"), rows=rows, batch_size=3, batcher=batcher) as batch:
        handles = run(batch, PROMPTS, params)

    check_choices(handles, expected)
    for handle, output in zip(handles, expected, strict=True):
        for ours, theirs in zip(handle.logprobs, output.logprobs, strict=True):
            assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
            assert abs(ours.logprob - theirs.logprob) <= 1e-4


def test_text_and_log_probabilities_move_with_an_extracted_query(tiny):
    loaded, folder = tiny
    prompt = loaded.tokenizer.encode("<|doc|>The city")
    params = SamplingParams(max_tokens=16, temperature=0, logprobs=1, ignore_eos=True)
    [expected] = of_engine([prompt], params, model=loaded)
    first, second = (DynamicBatch(own_model(folder), tokenizer=loaded.tokenizer) for _ in range(2))
    handle = first.submit(prompt, sampling=params)
    for _ in range(5):
        first.step()
    second.adopt(first.extract(handle))
    second.run()

    assert handle.text == expected.text
    assert len(handle.logprobs) == 16
