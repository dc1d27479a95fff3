"""Engines whose requests all decode, for measurements of decode steps."""

from collections.abc import Sequence

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig


def decoding_engine(
    model: LoadedModel, kv: KVConfig, prompts: Sequence[list[int]], new_tokens: int
) -> Engine:
    """An engine that has prefilled all prompts.

    Args:
        model: model of the engine.
        kv: KV memory that holds all requests.
        prompts: token ids of each request.
        new_tokens: most tokens of an output; a row already decodes while others are prefilled.
    """
    engine = Engine(model, kv, ScheduleConfig(max_num_seqs=len(prompts)))
    options = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for prompt in prompts:
        engine.submit(GenerationRequest(prompt, options))
    running = engine.scheduler.running
    while len(running) < len(prompts) or any(r.num_uncomputed > 1 for r in running):
        engine.step()
    return engine
