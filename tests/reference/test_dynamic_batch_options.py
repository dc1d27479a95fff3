"""DynamicBatch with stop texts and log-probabilities, against the engine."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.hf import DynamicBatch
from quire.models.loader import load_model
from quire.models.source import find_model
from quire.sampling.outputs import OutputBuilder
from quire.scheduler.schedule_config import ScheduleConfig
from support.dynamic import CHANGING, build
from support.engines import load, make_prompts
from support.kv_options import kv_config

PROMPTS = make_prompts(5, 60, seed=5)
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


def check_outputs(handles, outputs):
    for handle, output in zip(handles, outputs, strict=True):
        assert handle.token_ids == list(output.token_ids)
        assert handle.finish_reason == output.finish_reason


# ---- text and log-probabilities ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    folder, _ = find_model("quire-tiny")
    loaded = load_model(folder, dtype="float32")
    return loaded, folder


def own_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_stop_texts_end_outputs_as_in_the_engine(tiny):
    loaded, folder = tiny
    prompts = [loaded.tokenizer.encode(f"<|doc|>The {word}") for word in ("city", "river", "king")]
    plain = of_engine(prompts, SamplingParams(max_tokens=24, temperature=0), model=loaded)
    stop = tuple({output.text[6:9] for output in plain if len(output.text) > 9})
    params = SamplingParams(max_tokens=24, temperature=0, stop=stop)
    expected = of_engine(prompts, params, model=loaded)
    batch = DynamicBatch(own_model(folder), tokenizer=loaded.tokenizer, batch_size=2)
    handles = run(batch, prompts, params)

    check_outputs(handles, expected)
    assert [handle.text for handle in handles] == [output.text for output in expected]
    assert [handle.stop_reason for handle in handles] == [o.stop_reason for o in expected]
    assert any(handle.stop_reason in stop for handle in handles)


@pytest.mark.parametrize("batcher", CHANGING)
def test_log_probabilities_are_those_of_the_engine(batcher):
    params = SamplingParams(max_tokens=NEW, temperature=0, logprobs=2, ignore_eos=True)
    expected = of_engine(PROMPTS, params)
    handles = run(DynamicBatch(build("llama"), batch_size=3, batcher=batcher), PROMPTS, params)

    check_outputs(handles, expected)
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
