"""KVzip against Transformers: the prompt is repeated, its tokens are scored and evicted once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from quire import LLM, KVConfig, SamplingParams, ScheduleConfig
from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.errors import ModelError, NeverFits, RequestError, UnsoundCombination
from quire.hf import QuireCache
from quire.layout.packaged import SMOLLM2
from quire.models.loader import LoadedModel
from quire.policies.kvzip import KVzip
from quire.scheduler.peaks import Need
from quire.scheduler.step import StepSize
from reference.test_eviction_engine import NEW_TOKENS, run
from support import zoo
from support.engines import answer, greedy, largest_difference, load
from support.kv_options import kv_config

CAP, CHUNK, SINKS = 24, 32, 4
RULE = f"kvzip:cap={CAP},chunk={CHUNK}"
PROMPTS = {
    "short": [3 + i * i % 60 for i in range(31)],
    "long": [5 + i * i * 7 % 71 for i in range(90)],
    "within the cap": [9 + i % 50 for i in range(CAP)],
}
TOLERANCE = 1e-4


def kv_heads(model) -> int:
    """GPT-2 has no groups."""
    return getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)


@torch.inference_mode()
def scores_of(architecture: str, prompt: list[int]) -> Tensor:
    """Scores [layers, KV heads, tokens] of a prompt.

    The model has no tokenizer: no texts, but the last 8 tokens of the chunk before.
    """
    model, cache, best = eager(architecture), DynamicCache(), torch.tensor(0.0)
    model(torch.tensor([prompt]), past_key_values=cache, use_cache=True)
    for i in range(0, len(prompt), CHUNK):
        ids = prompt[max(0, i - 8) if i else 0 : i + CHUNK]
        positions = torch.arange(len(prompt), len(prompt) + len(ids))[None]
        options = {"position_ids": positions, "output_attentions": True, "use_cache": True}
        attentions = model(torch.tensor([ids]), past_key_values=cache, **options).attentions
        weights = torch.stack([layer[0].float() for layer in attentions])[..., : len(prompt)]
        found = weights.unflatten(1, (kv_heads(model), -1)).amax(dim=(2, 3))
        best = torch.maximum(best, found)
        cache.crop(-len(ids))
    return best


def eager(architecture: str):
    model = zoo.build(architecture)
    model.set_attn_implementation("eager")
    return model


def kept(scores: Tensor, cap: int) -> list[list[int]]:
    """The sinks and the highest scores of each lane, the lower position first."""
    found = []
    for lane in scores.flatten(0, 1):
        rest = sorted(range(SINKS, len(lane)), key=lambda i: (-float(lane[i]), i))
        found.append(sorted([*range(SINKS), *rest[: cap - SINKS]]))
    return found


@torch.inference_mode()
def outputs_of(architecture: str, prompt: list[int], retained: list[list[int]]) -> list[Tensor]:
    """Logits of a greedy continuation with the retained tokens of each lane."""
    model, cache = eager(architecture), DynamicCache()
    logits = [model(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, -1]]
    heads = kv_heads(model)
    for layer, states in enumerate(cache.layers):
        lanes = retained[layer * heads : (layer + 1) * heads]
        for name in ("keys", "values"):
            old = getattr(states, name)
            new = torch.stack([old[0, head, own] for head, own in enumerate(lanes)])[None]
            setattr(states, name, new)
    for step in range(NEW_TOKENS - 1):
        out = model(
            logits[-1].argmax()[None, None],
            past_key_values=cache,
            position_ids=torch.tensor([[len(prompt) + step]]),
            use_cache=True,
        )
        logits.append(out.logits[0, -1])
    return logits


def jobs(rule: str = RULE) -> dict[str, tuple[list[int], str]]:
    return {name: (prompt, rule) for name, prompt in PROMPTS.items()}


def engine_of(model: LoadedModel, evict: str = RULE, **kv: object) -> Engine:
    options = {"memory": "8MiB", "enable_prefix_caching": False} | kv
    config = kv_config(page_tokens=4, evict=evict, record_evictions=True, **options)
    return Engine(model, config, ScheduleConfig())


@pytest.fixture(params=[True, False], ids=["by layer", "by chunk"])
def by_layer(request, monkeypatch):
    if not request.param:
        decoder = "quire.models.adapter.TransformersDecoder"
        monkeypatch.setattr(f"{decoder}.prepare_by_layer", lambda self: "for the test")
    return request.param


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_scores_retained_tokens_and_outputs_are_those_of_transformers(
    architecture, by_layer, monkeypatch
):
    seen: dict[int, list[Tensor]] = {}

    def score(self, view):
        found = view.statistic(self.statistics[0])
        seen.setdefault(view.prompt_tokens, []).append(found.clone())
        return found

    monkeypatch.setattr(KVzip, "score", score)
    model = load(architecture)
    engine = engine_of(model)
    need = Need(90, eviction=engine.pool.eviction.spec)
    assert engine.scheduler.peaks.is_by_layer(need) == by_layer
    found = run(jobs(), engine=engine)

    assert found.usages["within the cap"].evicted_tokens == 0
    for name in ("short", "long"):
        scores = scores_of(architecture, PROMPTS[name])
        own = torch.cat(seen[len(PROMPTS[name])])
        assert (own - scores.flatten(0, 1)).abs().max() <= TOLERANCE
        [(computed, retained)] = found.traces()[name]
        assert computed == len(PROMPTS[name])
        assert retained == kept(scores, CAP)
        expected = outputs_of(architecture, PROMPTS[name], retained)
        for ours, theirs in zip(found.logits[name], expected, strict=True):
            assert (ours - theirs).abs().max() <= TOLERANCE


WAYS = {
    "small steps": {"max_num_batched_tokens": 16},
    "recomputed": {"preempts": 2},
    "swapped": {"preempts": 2, "host": "4MiB"},
    "cached prefixes": {"kv": {"enable_prefix_caching": True}},
}


SQUEEZE = "(squeeze:share=0.5)"
PAIRS = [
    *(("uniform", way) for way in WAYS),
    *(("ada", "recomputed"), ("ada", "cached prefixes"), ("pyramid", "swapped")),
    *((SQUEEZE, "small steps"), (SQUEEZE, "cached prefixes")),
]


@pytest.mark.parametrize(("budget", "way"), PAIRS)
def test_retained_tokens_do_not_depend_on_steps_preemption_and_cached_prefixes(budget, way):
    prompts = [prompt[:n] for prompt in PROMPTS.values() for n in (25, 40, 90)]
    made = {str(i): (prompt, f"{RULE},budget={budget}") for i, prompt in enumerate(prompts)}
    allow = {"evict_allow": f"kvzip:chunk={CHUNK}; kvzip:chunk={CHUNK},budget={budget}"}
    options = dict(WAYS[way])
    alone = run(made, kv=allow, max_num_seqs=1)
    found = run(made, kv=allow | options.pop("kv", {}), **options)
    assert found.traces() == alone.traces()
    assert largest_difference(found.logits, alone.logits) <= TOLERANCE


@pytest.mark.parametrize("first", ["full", RULE, "h2o:cap=80,when=prefill_end"])
def test_prefixes_are_shared_with_requests_without_statistics(first, by_layer):
    """The pass writes all its numbers, so that none are kept with a prefix."""
    model, prompt = load("llama"), PROMPTS["long"]
    alone = run({"again": (prompt, RULE)}, kv={"evict_allow": f"kvzip:chunk={CHUNK}"})
    engine = engine_of(model, enable_prefix_caching=True, evict_allow="all")
    run({"first": (prompt, first)}, engine=engine)
    kept = engine.stats().checkpoint_bytes
    found = run({"again": (prompt, RULE)}, engine=engine)

    assert found.usages["again"].cached_tokens == 88
    assert found.traces() == alone.traces()
    assert largest_difference(found.logits, alone.logits) <= TOLERANCE
    assert engine.stats().checkpoint_bytes == kept
    assert (kept > 0) == first.startswith("h2o")


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_bits_do_not_depend_on_steps_with_batch_invariance(tokens):
    kv = {"evict_allow": f"kvzip:chunk={CHUNK}", "enable_prefix_caching": tokens > 1}
    alone = run(jobs(), kv=kv, batch_invariant=True, max_num_seqs=1)
    found = run(jobs(), kv=kv, batch_invariant=True, max_num_batched_tokens=15 + tokens)
    assert found.traces() == alone.traces()
    assert largest_difference(found.logits, alone.logits) == 0


@pytest.mark.parametrize("model", ["qwen2_window", "gemma4", "deepseek_v3", "gpt_oss", "llama_mqa"])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_windows_shared_layers_latents_and_codecs_are_scored(model, codec):
    kv = {"evict_allow": f"kvzip:chunk={CHUNK}", "codec": codec}
    alone = run(jobs(), model=model, kv=kv, max_num_seqs=1)
    found = run(jobs(), model=model, kv=kv, preempts=1, max_num_batched_tokens=16)

    assert found.traces() == alone.traces()
    assert all(alone.usages[name].evicted_tokens for name in ("short", "long"))
    # a last bit can change a code of int8
    tolerance = TOLERANCE if codec == "none" else 0.1
    assert largest_difference(found.logits, alone.logits) <= tolerance


def test_a_memory_of_the_counted_peak_is_enough_and_less_is_refused(by_layer):
    model = load("llama")
    request = GenerationRequest(PROMPTS["long"], greedy(NEW_TOKENS))
    roomy = engine_of(model)
    spec = roomy.pool.eviction.spec
    need = Need(len(request.prompt) + NEW_TOKENS - 1, len(request.prompt), spec)
    needed_bytes = roomy.scheduler.peaks.fitting_bytes(need)

    found = run({"r": (request.prompt, RULE)}, engine=engine_of(model, memory=needed_bytes))
    assert found.usages["r"].kv_peak_bytes <= needed_bytes
    assert found.traces() == run({"r": (request.prompt, RULE)}, engine=roomy).traces()
    with pytest.raises(NeverFits):
        engine_of(model, memory=needed_bytes - 4096).submit(request)


def sampled(request_id: str, **options: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **options)
    return GenerationRequest(PROMPTS["long"], params, request_id=request_id)


@pytest.mark.parametrize("evict", [RULE, f"{RULE},budget=squeeze"])
def test_several_outputs_share_one_scored_prompt(evict):
    model, three = load("llama"), sampled("r", n=3, seed=5, temperature=0.8)
    alone = [sampled(str(i), seed=5 + i, temperature=0.8) for i in range(3)]
    beams = sampled("b", n=3, use_beam_search=True, temperature=0)
    together, expected, searched = (
        answer(engine_of(model, evict), requests).tokens for requests in ([three], alone, [beams])
    )
    assert [together["r", i] for i in range(3)] == [expected[str(i), 0] for i in range(3)]
    assert len(searched) == 3


def test_prompt_log_probabilities_are_those_without_the_pass():
    model, requests = load("llama"), [sampled("r", prompt_logprobs=1, temperature=0)]
    found = []
    for evict in (RULE, "full"):
        deltas = answer(engine_of(model, evict), requests).deltas
        found.append([score for delta in deltas for score in delta.prompt_logprobs or []])
    assert len(found[0]) == len(PROMPTS["long"])
    assert found[0] == found[1]


REFUSED = [
    ("qwen3_next", {}, "recurrent states or chunks of attention"),
    ("llama4", {}, "recurrent states or chunks of attention"),
    ("llama", {"codec": "int8+residual=16"}, "newest tokens in full precision"),
    ("llama", {"offload_memory": "1MiB"}, "leave out --kv-offload-memory"),
]


def test_rope_of_the_pass_is_that_of_its_last_position_or_refused():
    for architecture, kv, says in REFUSED:
        with pytest.raises(UnsoundCombination, match=says):
            engine_of(load(architecture), **kv)
    with pytest.raises(UnsoundCombination, match=r"a cache in Transformers cannot; use LLM"):
        QuireCache(zoo.build("llama"), policy=RULE, when="prefill_end")

    # prompt and output within the 24 positions of the short frequencies, the pass beyond
    engine = engine_of(load("phi3_longrope"), "kvzip:cap=50%", evict_allow="all")
    assert engine.model.decoder.rope_variant(24) == 0
    for tokens, evict in ((20, None), (20, "snapkv:cap=50%"), (12, None)):
        engine.submit(GenerationRequest(PROMPTS["long"][:tokens], greedy(4), evict=evict))
    assert [request.spec.rope_variant for request in engine.requests()] == [1, 0, 0]


TEXT_TOKENS = len("\n\nRepeat the part of the previous context that starts with") + 8 + 1 + 8


def test_a_chunk_is_what_the_context_has_left(monkeypatch):
    """Up to 16 chunks, which are few enough to be small."""
    engine, requests = engine_of(load("llama"), "kvzip:cap=50%"), []
    learned: list[int] = []
    monkeypatch.setattr(StepSize, "learn", lambda self, tokens: learned.append(tokens))
    for chunk in (120, 30):
        prompt = [5] * (zoo.MAX_POSITIONS - TEXT_TOKENS - chunk)
        engine.submit(GenerationRequest(prompt, greedy(4), request_id=str(chunk)))
        requests.append(request := engine.requests()[-1])
        assert {len(ids) for ids in request.spec.scoring_token_ids[1:-1]} == {chunk + 8}
        assert request.eviction.spec.scoring.chunk_tokens == chunk
    found = answer(engine).tokens
    passes = (sum(map(len, request.spec.scoring_token_ids)) for request in requests)
    computed = sum(len(request.prompt_token_ids) + 3 for request in requests)
    assert engine.num_processed_tokens == sum(learned) == computed + sum(passes)
    assert [len(found[name, 0]) for name in ("120", "30")] == [4, 4]
    prompt = [5] * (zoo.MAX_POSITIONS - TEXT_TOKENS - 20)
    with pytest.raises(RequestError, match=r"evict: .* 27 tokens or more at a time.* as snapkv$"):
        engine.submit(GenerationRequest(prompt, greedy(4)))


class Wordy(PreTrainedTokenizerBase):
    def encode(self, *_args, **_options):
        return [1] * 300


def test_a_refused_request_adds_no_statistics_and_passes_of_other_chunks_share_them():
    model = load("llama")
    groups = {}
    for name, tokenizer in (("refused", Wordy()), ("served", None)):
        engine = engine_of(replace(model, tokenizer=tokenizer), "full", evict_allow="all")
        before = len(engine.pool.kv.memory.layout.groups)
        for chunk in (2048, 16, 64):
            rule = f"kvzip:cap=50%,heads=mean,chunk={chunk}"
            request = GenerationRequest([5] * 90, greedy(4), evict=rule)
            if tokenizer is None:
                engine.submit(request)
            else:
                with pytest.raises(RequestError, match=r"^evict: the tokenizer writes the text"):
                    engine.submit(request)
        groups[name] = len(engine.pool.kv.memory.layout.groups) - before
    assert groups == {"refused": 0, "served": 1}
    other = engine_of(model, RULE)  # --evict-allow own: other numbers of the same rule
    other.submit(GenerationRequest([5] * 90, greedy(4), evict="kvzip:cap=50%,chunk=64"))
    with pytest.raises(RequestError, match="raise it to 6 or more"):
        other.submit(GenerationRequest([5] * 90, greedy(4), evict="kvzip:cap=50%,chunk=5"))


@pytest.mark.slow
def test_a_chat_model_repeats_the_prompt_after_the_text():
    kv = KVConfig(memory="8MiB", evict="kvzip:cap=50%,chunk=16")
    try:
        llm = LLM(SMOLLM2, dtype="float32", kv=kv)
    except ModelError as error:
        pytest.skip(str(error))
    tokenizer = llm.engine.model.tokenizer
    prompt = tokenizer.encode("The key of the blue door is 4711, and that of the red one is 1234.")
    llm.engine.submit(GenerationRequest(prompt, greedy(2), request_id="r"))
    [request] = llm.engine.requests()
    first, second = map(tokenizer.decode, request.spec.scoring_token_ids[:2])
    begin, ends, chunk = (tokenizer.decode(prompt[i:j]) for i, j in ((0, 16), (8, 16), (16, 32)))

    part = "\n\nRepeat the part of the previous context that starts with"
    assert first == f"\n\nRepeat the previous context:{begin}"
    assert second == f"{part}{ends}:{chunk}"
    answer(llm.engine)
    assert request.eviction.num_evictions == 1
