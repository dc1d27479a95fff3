"""Engines with attention in Triton, interpreted on the CPU, generate the reference's tokens."""

from functools import cache

import pytest

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.models.loader import load_model
from support.engines import greedy
from support.interpreted import interpreted

interpreted("backend")

PROMPT = "The cat sat on the mat. Then it"


@cache
def model():
    return load_model("quire-tiny", dtype="float32", device="cpu")


def generated(attention, **kv):
    """Tokens, evicted tokens and fallbacks of a short prompt and a shorter one."""
    llm = LLM(model(), kv=KVConfig(memory="4MiB", attention=attention, **kv), verify=False)
    outputs = llm.generate([PROMPT, "One"], greedy(5))
    assert llm.engine.pool.kv.backend.name == attention
    return [(out.token_ids, out.usage.evicted_tokens) for out in outputs]


@pytest.mark.parametrize(
    "kv",
    [
        {},
        {"codec": "int8"},
        {"codec": "int4"},
        {"evict": "h2o:cap=10,recent=3"},
        {"evict": "tova:cap=10", "codec": "fp8"},
    ],
    ids=str,
)
def test_tokens_are_those_of_the_reference(kv, caplog):
    expected = generated("reference", **kv)
    got = generated("triton", **kv)

    assert got == expected
    assert (got[0][1] > 0) == ("evict" in kv)
    assert "falls back" not in caplog.text
