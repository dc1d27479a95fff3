"""The attention scale is that of the model's calls, before the first step."""

import pytest

from quire.config.generation_request import GenerationRequest
from quire.engine.attention_scale import attention_scale
from quire.engine.core import Engine
from support.engines import greedy, load
from support.kv_options import kv_config


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite", "gpt2", "gpt_oss", "wide_llama"])
def test_scale_of_one_token_is_the_scale_of_a_request(name):
    model = load(name)
    found = attention_scale(model.decoder)
    engine = Engine(model, kv_config(memory="4MiB"))

    engine.submit(GenerationRequest([5, 6, 7], greedy(2)))
    while engine.has_work:
        engine.step()

    assert found == engine.pool.kv.scale
    assert found != 1.0
