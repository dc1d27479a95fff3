"""With `batch_invariant` a token's logits are, bit for bit, those of its request alone.

Each seed draws a batch, chunk and step sizes, a memory that preempts and ways to preempt. The
logits of each request at each position are compared with those of the request alone, in whole
chunks, in an ample memory.
"""

from dataclasses import replace

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.open_tier import kv_fingerprint
from quire.errors import RequestError, UnsoundCombination
from quire.kernels import select
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import load
from support.invariance import check, model_of, run

pytestmark = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)
MIXTURES = ("mixtral", "gpt_oss", "llama4", "mimo_v2_flash", "deepseek_v3")
NARROW = "gemma4_unified"
OTHERS = (*MIXTURES, NARROW, "phi3_longrope")
DENSE = [name for name in zoo.ARCHITECTURES if name not in OTHERS]
LATENT = ("youtu", "minicpm3", "glm_moe_dsa_dense")
QUICK = ("llama", "glm_moe_dsa_dense")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name in (*DENSE, *LATENT)
    ],
)
def test_no_batch_changes_a_bit(architecture):
    preemptions = check(model_of(architecture), range(4))

    assert preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_batch_changes_a_bit_in_another_type(dtype):
    check(model_of("llama", dtype), range(4))


@pytest.mark.slow
@pytest.mark.parametrize("path", range(len(PATHS)), ids=PATHS.__getitem__)
def test_no_batch_changes_a_bit_on_any_path_of_the_c_library(path, monkeypatch):
    library = load_library()
    if path > library.path:
        pytest.skip("this CPU has no such instructions")
    monkeypatch.setattr(select, "tested_library", lambda: replace(library, path=path))
    check(model_of("llama"), range(3))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_batch_changes_a_bit_with_several_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(model_of("llama"), range(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "glm_moe_dsa_dense"])
@pytest.mark.parametrize(
    "kv",
    [
        {"codec": "int8"},
        {"codec": "fp8/int8"},
        {"codec": "int4_outliers"},
        {"evict": "snapkv:cap=48,every=8,window=8"},
        {"evict": "keydiff:cap=48,every=8"},
        {"evict": "sinks:cap=48,every=8"},
    ],
)
def test_no_batch_changes_a_bit_with_allowed_codecs_and_rules(architecture, kv):
    check(model_of(architecture), range(4), kv)


def test_joined_keys_that_the_c_library_cannot_read_are_rejected():
    """The rotated part of its keys has 4 elements."""
    with pytest.raises(UnsoundCombination, match="whose parts are no multiples of 8"):
        run(model_of(NARROW), [0])


def test_without_the_option_a_batch_changes_bits():
    """Without the option the comparison finds differences, so it can fail."""
    model, numbers = model_of("llama", torch.float32), [3, 4, 5, 6]
    one = run(model, [6], batch_invariant=False)
    many = run(model, numbers, batch_invariant=False, chunk_tokens=7)

    places = [place for place in one.logits if place in many.logits]
    assert not all(torch.equal(one.logits[p][0], many.logits[p][0]) for p in places)


@pytest.mark.parametrize(
    ("kv", "says"),
    [
        ({"evict": "h2o:cap=48"}, "sum a statistic over tokens.*such as sinks, keydiff or snapkv"),
        ({"evict": "average:cap=48"}, "sum a statistic over tokens"),
        (
            {"evict": "sinks:cap=48,when=pressure"},
            "an eviction depends on other requests; use another when=",
        ),
        ({"evict": "streaming:cap=48"}, "needs native attention, got pre_rope"),
        (
            {"codec": "int8+residual=16"},
            "keeps a full-precision window of recent tokens; use --kv-codec none",
        ),
        ({"attention": "gathered"}, "--attention gathered"),
        ({"offload_memory": "1MiB"}, "attention over offloaded KV"),
    ],
)
def test_options_that_depend_on_the_batch_are_rejected(kv, says):
    with pytest.raises(UnsoundCombination, match=says):
        run(model_of("llama"), [0], kv)


def test_a_default_rule_with_sums_is_rejected_although_requests_may_name_all_rules():
    kv = KVConfig(memory="1MiB", evict="h2o:cap=16,every=4", evict_allow="all")

    with pytest.raises(UnsoundCombination, match="refuses rules that sum a statistic over tokens"):
        Engine(model_of("llama"), kv, ScheduleConfig(batch_invariant=True))


def test_a_request_that_depends_on_the_batch_is_rejected():
    config = KVConfig(memory="1MiB", evict="sinks:cap=48")
    engine = Engine(model_of("llama"), config, ScheduleConfig(batch_invariant=True))
    with pytest.raises(RequestError, match="an eviction depends on other requests"):
        engine.submit(
            GenerationRequest([5] * 60, SamplingParams(), evict="sinks:cap=40,when=pressure")
        )


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_experts_is_rejected(architecture):
    with pytest.raises(UnsoundCombination, match="mixture of experts"):
        run(load(architecture), [0])


def test_prefix_keys_differ_from_those_of_engines_without_the_option():
    natures = set()
    for batch_invariant in (False, True):
        schedule = ScheduleConfig(batch_invariant=batch_invariant)
        engine = Engine(model_of("llama"), KVConfig(memory="1MiB"), schedule)
        natures.add(kv_fingerprint(engine.pool, engine.model))

    assert len(natures) == 2
