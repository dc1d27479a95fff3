"""KV offload on a CUDA device: pinned memory, a copy stream and events; no device sync."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.offload.kv.cuda_transfer import StreamTransferWorker
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction import Recorder, largest_difference
from reference.test_offloaded_prefix import NEW_TOKENS, PROMPTS, row_bytes
from support.engines import greedy, load
from support.kv_options import kv_config

pytestmark = pytest.mark.gpu


def run(name, rows, **options):
    model = load(name, "cuda", times=3)
    config = kv_config(memory=int(rows * row_bytes(name)), page_tokens=4, **options)
    engine = Engine(model, config, ScheduleConfig(chunk_tokens=16, max_num_batched_tokens=40))
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    for request, prompt in PROMPTS.items():
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=request))
    while engine.has_work:
        engine.step()
        engine.check()
    return engine, recorder.logits


@pytest.mark.parametrize(
    "parts",
    [
        {"offload_recompute": "off"},
        {"offload_recompute": "1"},
        {"offload_recompute": "0.5"},
        {"offload_recompute": "off", "offload_cpu_attention": "0.5"},
        {},
    ],
)
@pytest.mark.parametrize("name", ["llama_mha", "llama", "opt"])
def test_logits_equal_those_with_enough_memory(name, parts, monkeypatch):
    def refuse(*_):
        raise AssertionError("the whole device was waited for")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    engine, logits = run(name, 0.8, offload_memory="4MiB", **parts)

    assert isinstance(engine.pool.offload.kv_offload.transfer_worker, StreamTransferWorker)
    assert engine.events.newest(["offloaded"])
    assert largest_difference(logits, run(name, 16)[1]) <= 1e-3
