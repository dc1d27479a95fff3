"""With `batch_invariant` a token's logits are, bit for bit, those of its request alone.

Each seed draws a batch, chunk and step sizes, a memory that preempts and ways to preempt. The
logits of each request at each position are compared with those of the request alone, in whole
chunks, in an ample memory.
"""

import random
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.open_tier import _nature
from quire.errors import RequestError, UnsoundCombination
from quire.kernels import select
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.models.adapter import TransformersDecoder
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.models.native.select import make_decoder
from quire.models.native_linear import available_products
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import StepPlan
from support import zoo
from support.engines import load
from support.kv_options import kv_config

pytestmark = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)
NEW_TOKENS = 24
LENGTHS = (1, 5, 30, 33, 64, 100)
PROMPTS = [
    [random.Random(length).randrange(2, zoo.VOCAB_SIZE) for _ in range(length)]
    for length in (*LENGTHS, 33, 64)
]
DENSE = [name for name in zoo.ARCHITECTURES if name not in ("mixtral", "gpt_oss", "phi3_longrope")]


@cache
def model_of(architecture: str, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    decoder = TransformersDecoder(zoo.build(architecture).to(dtype))
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name=architecture,
        weight_bytes=0,
    )


@dataclass
class Run:
    """Output tokens of requests, and the logits of each position."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    preemptions: int = 0


def params_of(number: int) -> SamplingParams:
    temperature = 0.0 if number % 2 else 0.9
    return SamplingParams(
        max_tokens=NEW_TOKENS,
        temperature=temperature,
        top_p=0.95,
        seed=number,
        logprobs=3,
        ignore_eos=True,
    )


def run(model: LoadedModel, numbers: list[int], kv: dict | None = None, **schedule) -> Run:
    config = kv_config(**{"memory": "16MiB", "enable_prefix_caching": False, **(kv or {})})
    engine = Engine(model, config, ScheduleConfig(**{"batch_invariant": True, **schedule}))
    done, runner = Run(), engine.runner

    class Spy:
        def run(self, plan: StepPlan) -> list:
            results = runner.run(plan)
            for result in results:
                name = result.request.request_id
                for i, row in enumerate(result.logits):
                    done.logits.setdefault((name, result.first_position + i), []).append(row)
            return results

    engine.runner = Spy()
    for number in numbers:
        engine.submit(GenerationRequest(PROMPTS[number], params_of(number), request_id=str(number)))
    while engine.has_work:
        for delta in engine.step():
            assert not delta.error
            done.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            for scores in delta.logprobs or ():
                done.logprobs.setdefault(delta.request_id, []).append(scores.logprob)
    engine.check()
    done.preemptions = engine.stats().num_preemptions
    return done


def alone(model: LoadedModel, kv: dict | None = None) -> Run:
    whole = Run()
    for number in range(len(PROMPTS)):
        one = run(model, [number], kv)
        whole.tokens |= one.tokens
        whole.logits |= one.logits
        whole.logprobs |= one.logprobs
    return whole


def drawn(model: LoadedModel, rng: random.Random, kv: dict | None = None) -> tuple[dict, list[int]]:
    """Options and requests of a run, with memory for one to three of the largest requests."""
    numbers = 2 * len(model.spec.layers) * model.spec.num_kv_heads * model.spec.head_dim
    largest = numbers * model.decoder.dtype.itemsize * (max(LENGTHS) + NEW_TOKENS + 32)
    memory = 1 << 24 if rng.random() < 0.3 else int(largest * rng.choice((1.1, 1.4, 2)))
    preempt = rng.choice(("recompute", "recompute", "swap", "auto"))
    requested = {"memory": memory, "swap_space": 0 if preempt == "recompute" else "1MiB"}
    requested["enable_prefix_caching"] = rng.random() < 0.5
    schedule = {
        "kv": {**requested, **(kv or {})},
        "chunk_tokens": rng.choice((2, 7, 16, 40, 2048)),
        "max_num_batched_tokens": rng.choice((16, 50, 2048)),
        "max_num_seqs": rng.choice((3, 8, 16)),
        "preempt": preempt,
    }
    return schedule, rng.sample(range(len(PROMPTS)), rng.randint(5, len(PROMPTS)))


def check(model: LoadedModel, seeds: range, kv: dict | None = None) -> int:
    """Compare the runs; return the number of preemptions."""
    expected, preemptions = alone(model, kv), 0
    for seed in seeds:
        options, numbers = drawn(model, random.Random(seed), kv)
        found = run(model, numbers, **options)
        for number in map(str, numbers):
            assert found.tokens[number] == expected.tokens[number], (seed, number)
            assert found.logprobs[number] == expected.logprobs[number], (seed, number)
        for place, rows in found.logits.items():
            for row in rows:
                assert torch.equal(row, expected.logits[place][0]), (seed, place)
        preemptions += found.preemptions
    return preemptions


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama")) for name in DENSE],
)
def test_no_batch_changes_a_bit(architecture):
    preemptions = check(model_of(architecture), range(4))

    assert preemptions > 3


@pytest.mark.skipif(available_products() is None, reason="no products of quantized weights")
@pytest.mark.parametrize(
    ("architecture", "impl", "codec"),
    [
        ("qwen3", "native", "int4"),
        pytest.param("qwen3", "native", "int8", marks=pytest.mark.slow),
        pytest.param("llama", "transformers", "int8", marks=pytest.mark.slow),
        pytest.param("gpt2", "transformers", "int4", marks=pytest.mark.slow),
    ],
)
def test_no_batch_changes_a_bit_with_quantized_weights(architecture, impl, codec):
    plain = zoo.build(architecture).to(torch.bfloat16)
    decoder = make_decoder(plain, None, impl=impl, codec=codec)
    model = replace(model_of(architecture), decoder=decoder, weight_codec=codec)

    assert check(model, range(2)) > 0


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


@pytest.mark.parametrize(
    "kv",
    [
        pytest.param({"codec": "int8"}, marks=pytest.mark.slow),
        pytest.param({"codec": "fp8/int8"}, marks=pytest.mark.slow),
        pytest.param({"codec": "int4_outliers"}, marks=pytest.mark.slow),
        pytest.param({"evict": "snapkv:cap=48,every=8,window=8"}, marks=pytest.mark.slow),
        pytest.param({"evict": "keydiff:cap=48,every=8"}, marks=pytest.mark.slow),
        pytest.param({"evict": "sinks:cap=48,every=8"}, marks=pytest.mark.slow),
    ],
)
def test_no_batch_changes_a_bit_with_allowed_codecs_and_rules(kv):
    check(model_of("llama"), range(4), kv)


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


def test_a_request_that_depends_on_the_batch_is_rejected():
    config = KVConfig(memory="1MiB", evict="sinks:cap=48")
    engine = Engine(model_of("llama"), config, ScheduleConfig(batch_invariant=True))
    with pytest.raises(RequestError, match="an eviction depends on other requests"):
        engine.submit(
            GenerationRequest([5] * 60, SamplingParams(), evict="sinks:cap=40,when=pressure")
        )


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_a_mixture_of_experts_is_rejected(architecture):
    with pytest.raises(UnsoundCombination, match="mixture of experts"):
        run(load(architecture), [0])


def test_prefix_keys_differ_from_those_of_engines_without_the_option():
    natures = set()
    for batch_invariant in (False, True):
        schedule = ScheduleConfig(batch_invariant=batch_invariant)
        engine = Engine(model_of("llama"), KVConfig(memory="1MiB"), schedule)
        natures.add(_nature(engine.pool, engine.model))

    assert len(natures) == 2
