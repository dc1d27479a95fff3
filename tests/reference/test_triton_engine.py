"""Engines with attention in Triton, interpreted on the CPU, generate the reference's tokens."""

from functools import cache

import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.models.loader import load_model
from support.engines import greedy
from support.interpreted import interpreted

interpreted("backend")

PROMPT = "The cat sat"


@cache
def model():
    return load_model("quire-tiny", dtype="float32", device="cpu")


def generated(attention, **kv):
    llm = LLM(model(), kv=KVConfig(memory="1MiB", attention=attention, **kv), verify=False)
    (out,) = llm.generate([PROMPT], greedy(3))
    assert llm.engine.pool.kv.backend.name == attention
    return out.token_ids, out.usage.evicted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("kv", [{}, {"codec": "int8"}, {"evict": "h2o:cap=4,recent=2"}], ids=str)
def test_tokens_are_those_of_the_reference(kv, caplog):
    expected = generated("reference", **kv)
    got = generated("triton", **kv)
    assert got == expected
    assert (got[1] > 0) == ("evict" in kv)
    assert "falls back" not in caplog.text
