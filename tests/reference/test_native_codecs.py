"""Attention and scores in C, compared with the gathered and the reference backend."""

import pytest

from quire.kernels.native.library import NativeLibrary, load_library
from reference.test_eviction_engine import run
from support.engines import largest_difference, make_prompts
from support.pairwise import every_pair

MODEL = "qwen3"  # heads of 16 numbers
JOBS = {f"r{i}": (prompt, "full") for i, prompt in enumerate(make_prompts(2, 60, seed=3))}

pytestmark = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)


@every_pair(
    codec=["int8", "int4/int8", "int4_outliers", "int4_hadamard", "int8/int4_hadamard"],
    chunk_tokens=[7, 64],
    model=[MODEL, "mimo_v2_flash", "deepseek_v3"],
)
def test_c_gives_the_logits_of_the_gathered_backend(codec, chunk_tokens, model):
    """A value between two codes may be rounded to either: see tests/support/exact_products.py."""
    kv = {"codec": codec, "enable_prefix_caching": False, "evict_allow": "none"}
    found = [
        run(JOBS, model=model, kv=kv | {"attention": name}, chunk_tokens=chunk_tokens)
        for name in ("native", "gathered")
    ]
    assert found[0].engine.pool.kv.backend.name == "native"
    assert largest_difference(found[0].logits, found[1].logits) <= 0.05


@every_pair(
    evict=["h2o", "snapkv:window=4", "keydiff", "value_norm"],
    codec=["none", "int8", "int4", "int4_hadamard"],
)
def test_keys_and_values_of_unequal_width_are_evicted_as_in_the_reference(evict, codec):
    rule = f"{evict}{',' if ':' in evict else ':'}cap=24,every=6"
    jobs = {request: (prompt, rule) for request, (prompt, _) in JOBS.items()}
    kv = {"codec": codec, "evict_allow": evict}
    found = [
        run(jobs, model="mimo_v2_flash", kv=kv | {"attention": name}, chunk_tokens=16)
        for name in ("native", "reference")
    ]

    assert found[0].engine.pool.kv.backend.name == "native"
    assert any(entry for trace in found[0].traces().values() for entry in trace)
    assert found[0].traces() == found[1].traces()
    bound = 1e-4 if codec == "none" else 0.05
    assert largest_difference(found[0].logits, found[1].logits) <= bound


@pytest.mark.parametrize(
    "codec",
    [
        *("int8", "int4", "int8/none", "none/int4_outliers", "int4_hadamard", "int4_page/int8"),
        *("int8+sinks=2+residual=6", "int2+residual=8+promoted=4:int4"),
    ],
)
def test_latents_in_codes_give_the_logits_of_attention_to_heads(codec):
    """The reference decodes latents, and expands them to keys and values of heads."""
    rule = "h2o:cap=40,every=8" if "promoted" in codec else "full"
    jobs, kv = {r: (prompt, rule) for r, (prompt, _) in JOBS.items()}, {"evict_allow": "h2o"}
    reference, gathered, chosen = (
        run(jobs, model="deepseek_v3", kv=kv | {"codec": codec, "attention": name}, chunk_tokens=16)
        for name in ("reference", "gathered", "auto")
    )
    plain = run(jobs, model="deepseek_v3", kv=kv, chunk_tokens=16)

    first = [{r: rows[:1] for r, rows in found.logits.items()} for found in (reference, plain)]
    assert 1e-4 < largest_difference(*first) <= (0.2 if codec.startswith("int8") else 6)
    for other in (gathered, chosen):
        assert other.traces() == reference.traces()
        assert largest_difference(other.logits, reference.logits) <= 0.05
