"""With `batch_invariant` a token's logits are, bit for bit, those of its request alone.

Each seed draws a batch, chunk and step sizes, a memory that preempts and ways to preempt. The
logits of each request at each position are compared with those of the request alone, in whole
chunks, in an ample memory.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import Tensor

from models import tiny
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.open_tier import kv_fingerprint
from quire.errors import RequestError, UnsoundCombination
from quire.kernels import select
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.kernels.native.linear import Products
from quire.models import adapter, loader
from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel, make_decoder
from quire.models.native.decoder import NativeDecoder
from quire.models.native_linear import available_products
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import StepPlan
from support import zoo
from support.engines import load, loaded
from support.kv_options import kv_config

NEW_TOKENS = 24
LENGTHS = (1, 5, 30, 33, 64, 100)
PROMPTS = [
    [random.Random(length).randrange(2, zoo.VOCAB_SIZE) for _ in range(length)]
    for length in (*LENGTHS, 33, 64)
]


@cache
def model_of(architecture: str, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    in_zoo = zoo.ARCHITECTURES | zoo.LATENT | zoo.HYBRID | zoo.OWN_ATTENTION | zoo.OTHERS
    build = zoo.build if architecture in in_zoo else tiny.build
    return loaded(TransformersDecoder(build(architecture).to(dtype)), architecture)


@dataclass
class Run:
    """Output tokens of requests, and the logits of each position."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)  # preemptions, swaps, cached tokens


def params_of(number: int) -> SamplingParams:
    drawn = {"temperature": 0.0 if number % 2 else 0.9, "top_p": 0.95, "seed": number}
    return SamplingParams(max_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True, **drawn)


FOLLOWED_BY = [7, 8, 9, 10, 11]


def run(
    model: LoadedModel, numbers: list[int], kv: dict | None = None, *, turns: int = 1, **schedule
) -> Run:
    """Run requests together, and then their later turns, each after prompt and output."""
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
    prompts = {str(number): (number, PROMPTS[number]) for number in numbers}
    for _ in range(turns):
        for name, (number, prompt) in prompts.items():
            engine.submit(GenerationRequest(prompt, params_of(number), request_id=name))
        while engine.has_work:
            for delta in engine.step():
                assert not delta.error
                done.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                for scores in delta.logprobs or ():
                    done.logprobs.setdefault(delta.request_id, []).append(scores.logprob)
        prompts = {
            f"{name}+": (number, [*prompt, *done.tokens[name], *FOLLOWED_BY])
            for name, (number, prompt) in prompts.items()
        }
    engine.check()
    stats = engine.stats()
    for what in ("num_preemptions", "num_swaps", "cached_tokens"):
        done.seen[what] = getattr(stats, what)
    return done


def alone(
    model: LoadedModel,
    kv: dict | None = None,
    numbers: Sequence[int] = range(len(PROMPTS)),
    turns: int = 1,
) -> Run:
    whole = Run()
    for number in numbers:
        one = run(model, [number], kv, turns=turns)
        whole.tokens |= one.tokens
        whole.logits |= one.logits
        whole.logprobs |= one.logprobs
    return whole


def memory_for(model: LoadedModel, room: float, kv: dict | None = None, turns: int = 1) -> int:
    """Bytes for this number of the largest requests, at least for one."""
    probe = Engine(model, kv_config(**{"memory": "16MiB", **(kv or {})}), ScheduleConfig())
    longest = max(LENGTHS) + NEW_TOKENS + (turns - 1) * (NEW_TOKENS + len(FOLLOWED_BY))
    need, peaks = Need(longest, eviction=probe.pool.eviction.spec), probe.scheduler.peaks
    return max(int(room * peaks.peak_bytes(need)), peaks.fitting_bytes(need))


def drawn(model: LoadedModel, rng: random.Random, kv: dict | None = None) -> tuple[dict, list[int]]:
    """Options and requests of a run, with memory for one to three of the largest requests."""
    memory = memory_for(model, rng.choice((1.4, 1.8, 2.5)), kv)
    memory = 1 << 24 if rng.random() < 0.3 else memory
    preempt = rng.choice(("recompute", "recompute", "swap", "auto"))
    requested = {"memory": memory, "swap_space": 0 if preempt == "recompute" else "1MiB"}
    requested["enable_prefix_caching"] = rng.random() < 0.5
    schedule = {"kv": {**requested, **(kv or {})}, "preempt": preempt}
    schedule["chunk_tokens"] = rng.choice((2, 7, 16, 40, 2048))
    schedule["max_num_batched_tokens"] = rng.choice((16, 50, 2048))
    schedule["max_num_seqs"] = rng.choice((3, 8, 16))
    return schedule, rng.sample(range(len(PROMPTS)), rng.randint(5, len(PROMPTS)))


def check_equal(found: Run, expected: Run) -> None:
    """Compare outputs, log-probabilities and logits, bit for bit."""
    for name, tokens in found.tokens.items():
        assert tokens == expected.tokens[name], name
        assert found.logprobs[name] == expected.logprobs[name], name
    for place, rows in found.logits.items():
        for row in rows:
            assert torch.equal(row, expected.logits[place][0]), place


def check(model: LoadedModel, seeds: range, kv: dict | None = None) -> int:
    """Compare drawn runs with those of each request alone; return the number of preemptions."""
    expected, preemptions = alone(model, kv), 0
    for seed in seeds:
        options, numbers = drawn(model, random.Random(seed), kv)
        found = run(model, numbers, **options)
        check_equal(found, expected)
        preemptions += found.seen["num_preemptions"]
    return preemptions


pytestmark = pytest.mark.skipif(
    not isinstance(load_library(), NativeLibrary), reason="the C extension is not built"
)
MIXTURES = ("mixtral", "gpt_oss", "llama4", "mimo_v2_flash", "deepseek_v3", "qwen3_next", "jamba")
NARROW = "gemma4_unified"
OTHERS = (*MIXTURES, NARROW, "phi3_longrope")
DENSE = [name for name in zoo.ARCHITECTURES if name not in OTHERS]
LATENT = ["youtu", "minicpm3", "glm_moe_dsa_dense"]
HALF = (torch.float32, torch.float16)
QUICK = ("llama", "glm_moe_dsa_dense")
HYBRIDS = ("mamba", "mamba2", "zamba", "zamba2", "falcon_h1", "olmo_hybrid", "lfm3")


@pytest.mark.parametrize(
    "architecture",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in DENSE + LATENT if n not in QUICK)],
)
def test_no_batch_changes_a_bit(architecture):
    preemptions = check(model_of(architecture), range(4))
    assert preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("mistral", torch.float32),  # pages that left its window are freed
        *(("llama", dtype) for dtype in HALF),
    ],
)
def test_no_batch_changes_a_bit_in_another_type(architecture, dtype):
    check(model_of(architecture, dtype), range(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [name for name in (*zoo.HYBRID, *HYBRIDS) if name not in MIXTURES]
)
def test_no_batch_chunk_or_turn_changes_a_bit_of_a_hybrid(architecture):
    """Tokens of a prompt, an output and a later prompt update the states by one operation."""
    model, numbers = model_of(architecture), (3, 4, 5)
    expected = alone(model, None, numbers, turns=2)
    for kv, chunk_tokens in (({}, 1), ({"enable_prefix_caching": True}, 7)):
        found = run(model, numbers, kv, turns=2, chunk_tokens=chunk_tokens)
        check_equal(found, expected)
        assert bool(found.seen["cached_tokens"]) == bool(kv)
    if not any(layer.attends for layer in model.spec.layers):
        return  # its requests do not grow
    for preempt, swap_space in (("swap", "1MiB"), ("recompute", 0)):
        schedule = {"preempt": preempt, "admission": "optimistic", "chunk_tokens": 64}
        for room in (1.3, 1.15, 1.5, 1.8):  # slabs hold different numbers of pages
            kv = {"memory": memory_for(model, room, turns=2), "swap_space": swap_space}
            found = run(model, numbers, kv, turns=2, **schedule)
            check_equal(found, expected)
            if found.seen["num_preemptions"]:
                break
        assert found.seen["num_preemptions"] > 0
        assert bool(found.seen["num_swaps"]) == (preempt == "swap")


@pytest.mark.parametrize("states", ["bfloat16", "int8"])
def test_chunks_change_no_bit_of_a_hybrid_whose_states_are_rounded(states):
    model, kv = model_of("bamba"), {"codec": f"none+states={states}"}
    expected = run(model, [2], kv)
    check_equal(run(model, [2], kv, chunk_tokens=7), expected)
    assert run(model, [2]).logprobs != expected.logprobs


@pytest.mark.slow
@pytest.mark.parametrize("path", range(len(PATHS)), ids=PATHS.__getitem__)
def test_no_batch_changes_a_bit_on_any_path_of_the_c_library(path, monkeypatch):
    library = load_library()
    if path > library.best_path:
        pytest.skip("this CPU has no such instructions")
    monkeypatch.setattr(select, "tested_library", lambda: replace(library, path=path))
    check(model_of("llama"), range(3))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_batch_changes_a_bit_with_several_threads(threads, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    check(model_of("llama"), range(3))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", QUICK)
@pytest.mark.parametrize(
    "kv",
    [
        *({"codec": codec} for codec in ("int8", "fp8/int8", "int4_outliers")),
        *(
            {"evict": f"{rule}cap=48,every=8"}
            for rule in ("snapkv:window=8,", "keydiff:", "sinks:")
        ),
    ],
)
def test_no_batch_changes_a_bit_with_allowed_codecs_and_rules(architecture, kv):
    check(model_of(architecture), range(4), kv)


@pytest.mark.parametrize(
    ("codec", "evict", "in_c"),
    [
        *product(("none", "int8", "int4"), ("full", "keydiff:cap=80,every=8"), [False]),
        ("none", "full", True),
    ],
)
def test_no_batch_changes_a_bit_with_sparse_attention(codec, evict, in_c):
    rule = "quest:pages=3,recent=1,sinks=0,dense_layers=0"
    kv = {"sparse": rule, "page_tokens": 8, "codec": codec, "evict": evict}
    model = with_layers("qwen3", "native", "auto") if in_c else model_of("llama")
    assert check(model, range(4), kv) > 0
    one = alone(model, kv, [5])
    assert one.logprobs != alone(model, kv | {"sparse": "off"}, [5]).logprobs


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
        ({"evict": "h2o:cap=16", "evict_allow": "all"}, "refuses rules that sum a statistic over"),
        ({"evict": "sinks:cap=48,when=pressure"}, "depends on other requests; use another when="),
        ({"evict": "streaming:cap=48"}, "needs native attention, got pre_rope"),
        ({"codec": "int8+residual=16"}, "full-precision window of recent tokens; use --kv-codec"),
        ({"attention": "gathered"}, "--attention gathered"),
        ({"offload_memory": "1MiB"}, "attention over offloaded KV"),
    ],
)
def test_options_that_depend_on_the_batch_are_rejected(kv, says):
    with pytest.raises(UnsoundCombination, match=says):
        run(model_of("llama"), [0], kv)


def test_requests_and_models_that_depend_on_the_batch_are_rejected():
    """The rotated part of the keys of `NARROW` has 4 elements."""
    config = KVConfig(memory="1MiB", evict="sinks:cap=48")
    engine = Engine(model_of("llama"), config, ScheduleConfig(batch_invariant=True))
    request = GenerationRequest([5] * 60, SamplingParams(), evict="sinks:cap=40,when=pressure")
    with pytest.raises(RequestError, match="an eviction depends on other requests"):
        engine.submit(request)
    with pytest.raises(UnsoundCombination, match="whose parts are no multiples of 8"):
        run(model_of(NARROW), [0])


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_experts_is_rejected(architecture):
    with pytest.raises(UnsoundCombination, match="mixture of experts"):
        run(load(architecture), [0])


def test_prefix_keys_differ_from_those_of_engines_without_the_option():
    natures = set()
    for invariant in (False, True):
        schedule = ScheduleConfig(batch_invariant=invariant)
        engine = Engine(model_of("llama"), KVConfig(memory="1MiB"), schedule)
        natures.add(kv_fingerprint(engine.pool, engine.model))
    assert len(natures) == 2


# ---- the fused and the quantized layers ----------------------------------------------------------


def with_layers(architecture: str, impl: str, codec: str) -> LoadedModel:
    plain = zoo.build(architecture).to(torch.bfloat16)
    decoder = make_decoder(plain, None, impl=impl, codec=codec)
    return replace(model_of(architecture), decoder=decoder, weight_codec=codec)


@pytest.mark.skipif(available_products() is None, reason="no products of the C extension")
@pytest.mark.parametrize("path", range(1, len(PATHS)), ids=PATHS[1:])
@pytest.mark.parametrize("pages", ["none", "int8"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_no_batch_changes_a_bit_in_the_native_decoder(weights, pages, path, monkeypatch):
    library = load_library()
    if path > library.best_path:
        pytest.skip("this CPU has no such instructions")
    limited = replace(library, path=path)
    monkeypatch.setattr(select, "tested_library", lambda: limited)
    monkeypatch.setattr(loader, "load_library", lambda: limited)
    for name in ("available_products", "fastest_products"):
        monkeypatch.setattr(adapter, name, lambda: Products(limited))
    model = with_layers("qwen3", "native", weights)
    assert isinstance(model.decoder, NativeDecoder)

    assert check(model, range(0, 4, 2), {"codec": pages}) > 0


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
    assert check(with_layers(architecture, impl, codec), range(2)) > 0
