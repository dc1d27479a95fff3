"""QuireCache in Transformers' generate: its tokens, and the retained sets of the engine."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.hf import QuireCache
from quire.hf.cache import retained_positions
from quire.kv.memory import KVMemory
from support import zoo
from support.engines import greedy, load, make_prompts
from support.kv_options import kv_config

NEW_TOKENS = 16
PAD = 0
CAP, EVERY = 24, 8
RULES = {
    "recent": "recent:sinks=2",
    "h2o": "h2o:recent=8",
    "average": "average",
    "snapkv": "snapkv:window=6",
}


def build(name: str) -> PreTrainedModel:
    model = zoo.build(name)
    model.generation_config.eos_token_id = None
    return model


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(
            [[PAD] * n + prompt for n, prompt in zip(pads, prompts, strict=True)]
        ),
        "attention_mask": torch.tensor([[0] * n + [1] * (longest - n) for n in pads]),
    }


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], **options: object) -> Tensor:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": PAD, **options}
    out = model.generate(**inputs, **options)
    return out[:, inputs["input_ids"].shape[1] :]


def memory_of(cache: QuireCache) -> KVMemory:
    assert cache._rows.kv is not None
    return cache._rows.kv.memory


def all_kept(cache: QuireCache, row: int) -> list[list[list[int]]]:
    return [cache.retained_positions(row, layer) for layer in range(cache._decoder.spec.num_layers)]


PROMPTS = make_prompts(3, 60, seed=7)
KINDS = ("llama", "gemma3", "gpt2", "gemma3n", "gemma4", "llama4", "deepseek_v3")
UNEQUAL = ("mimo_v2_flash", "deepseek_v2", "minicpm3")


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "full") for name in (*KINDS, "gpt_oss", "phi3_longrope", *UNEQUAL)]
    + [(name, "full") for name in ("bloom", "mpt", "gpt_neo")]
    + [(name, "h2o:recent=4,cap=200") for name in (*KINDS, "bloom")],
)
def test_a_large_budget_gives_the_tokens_of_transformers(name, policy) -> None:
    # with pads, Llama 4 in Transformers counts them in the positions that scale its queries
    model, inputs = build(name), padded(PROMPTS[:1] if name == "llama4" else PROMPTS)
    limit = 24 if name == "phi3_longrope" else 200
    new = 4 if name == "phi3_longrope" else NEW_TOKENS
    inputs = {key: value[:, -20:] for key, value in inputs.items()} if limit == 24 else inputs
    expected = generate(model, inputs, max_new_tokens=new)

    with QuireCache(model, policy, max_tokens=limit) as cache:
        got = generate(model, inputs, max_new_tokens=new, past_key_values=cache)
        memory_of(cache).check()

    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "rule", "when"),
    [("llama", rule, "prefill_and_decode") for rule in RULES]
    + [("gemma3", "h2o", "prefill_and_decode"), ("gpt2", "snapkv", "prefill_and_decode")]
    + [("mimo_v2_flash", "h2o", "prefill_and_decode")]
    + [("deepseek_v3", rule, "prefill_and_decode") for rule in ("h2o", "snapkv")]
    + [("gemma4", "snapkv", "prefill_and_decode"), ("llama4", "h2o", "prefill_and_decode")]
    + [("llama", "h2o", "prefill_end"), ("llama", "average", "decode")],
)
def test_retained_sets_and_tokens_equal_those_of_the_engine(name, rule, when) -> None:
    prompts = [prompt for prompt in make_prompts(5, 60, seed=3) if len(prompt) > CAP]
    expected = engine_kept(name, f"{RULES[rule]},cap={CAP},every={EVERY},when={when}", prompts)
    model = build(name)

    with QuireCache(model, RULES[rule], CAP, every=EVERY, when=when) as cache:
        tokens = generate(model, padded(prompts), past_key_values=cache).tolist()
        kept = [all_kept(cache, row) for row in range(len(prompts))]
        memory_of(cache).check()

    assert list(zip(tokens, kept, strict=True)) == expected
    assert any(len(head) < CAP + NEW_TOKENS for row in kept for layer in row for head in layer)


def engine_kept(
    name: str, evict: str, prompts: list[list[int]], codec: str = "none"
) -> list[tuple[list[int], object]]:
    """Tokens of an engine, and the retained positions of each request after its last token."""
    if "," in evict and ":" not in evict:
        evict = evict.replace(",", ":", 1)
    model = load(name)
    options = {"evict": evict, "codec": codec, "enable_prefix_caching": False}
    engine = Engine(model, kv_config(memory="16MiB", **options))
    for i, prompt in enumerate(prompts):
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS + 1), request_id=str(i)))
    kept: dict[str, object] = {}
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for delta in engine.step():
            assert not delta.error
            tokens[delta.request_id] += delta.token_ids
        for request in engine.scheduler.running:
            if len(request.output_token_ids) == NEW_TOKENS:
                layers = range(model.spec.num_layers)
                kept[request.request_id] = [
                    retained_positions(engine.pool.kv, request.memory.row, layer)
                    for layer in layers
                ]
    return [(tokens[key][:NEW_TOKENS], kept[key]) for key in tokens]


@pytest.mark.parametrize(
    ("budget", "ratio", "cap"), [(64, None, 64), ("50%", None, 150), (None, 0.5, 150)]
)
def test_a_budget_alone_is_enough(budget, ratio, cap) -> None:
    """64 tokens, and half of 300: close to the budget is retained with every schedule."""
    model = build("llama")
    prompt = [[2 + i % 90 for i in range(300)]]
    with QuireCache(model, "h2o", budget, compression_ratio=ratio) as cache:
        generate(model, padded(prompt), past_key_values=cache)
        kept = all_kept(cache, 0)

    assert all(7 * cap // 8 <= len(head) <= cap for layer in kept for head in layer)


@pytest.mark.parametrize("rule", ["recent", "h2o"])
def test_the_peak_is_the_cap_for_prompts_ten_times_as_long(rule) -> None:
    model = build("llama")
    prompts = [[3, 5, 7] * (10 * CAP // 3), [9] * (10 * CAP)]

    with QuireCache(model, RULES[rule], CAP, every=EVERY, page_tokens=4) as cache:
        generate(model, padded(prompts), past_key_values=cache)
        memory = memory_of(cache)
        groups = memory.layout.groups

        assert 0 < cache.kv_used_bytes <= cache.kv_peak_bytes
        assert cache.kv_peak_bytes <= 2 * sum(group.bytes_at_most(CAP, 1) for group in groups)
        assert cache.get_seq_length() == 10 * CAP + NEW_TOKENS - 1


def test_tokens_of_a_prompt_are_evicted_after_its_prefill() -> None:
    model = build("llama")

    with QuireCache(model, "h2o", "25%", when="prefill_end") as cache:
        model(torch.tensor([[3, 5, 7, 9] * 20]), past_key_values=cache)

        assert {len(head) for head in cache.retained_positions(0, 1)} == {20}


def test_under_pressure_no_token_is_evicted_while_pages_are_free() -> None:
    model, inputs = build("llama"), padded([[3, 5, 7] * 40])
    ample = {"when": "pressure", "every": EVERY, "page_tokens": 4}

    with QuireCache(model, "recent", CAP, **ample) as cache:
        generate(model, inputs, past_key_values=cache)
        assert len(cache.retained_positions(0, 0)[0]) == 120 + NEW_TOKENS - 1
        needed = cache.kv_peak_bytes

    with QuireCache(model, "recent", CAP, memory=needed // 2, **ample) as cache:
        generate(model, inputs, past_key_values=cache)
        assert len(cache.retained_positions(0, 0)[0]) < 120
        assert cache.kv_peak_bytes <= needed // 2


def test_logits_of_a_prompt_are_returned_in_order() -> None:
    model, inputs = build("llama"), padded(PROMPTS)
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits

    with QuireCache(model) as cache:
        got = model(**inputs, past_key_values=cache).logits

    assert (got[seen] - expected[seen]).abs().max() <= 1e-4
    assert not got[~seen].any()


def test_chunked_prefill_of_generate_retains_the_same_tokens() -> None:
    model, inputs = build("llama"), padded([[3, 5, 7] * 20])
    kept = []
    for chunk in (None, 7):
        with QuireCache(model, "recent", CAP, every=EVERY) as cache:
            generate(model, inputs, past_key_values=cache, prefill_chunk_size=chunk)
            kept.append(max(map(len, cache.retained_positions(0, 0))))

    assert max(kept) <= CAP


@pytest.mark.parametrize("policy", ["full", "h2o:cap=200"])
def test_beams_equal_transformers_and_share_pages(policy) -> None:
    model, inputs = build("llama"), padded(PROMPTS[:2])
    expected = generate(model, inputs, num_beams=3)

    with QuireCache(model, policy, page_tokens=4) as cache:
        got = generate(model, inputs, num_beams=3, past_key_values=cache)
        memory_of(cache).check()

        assert cache.batch_size == 6
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rule", ["recent", "h2o"])
def test_each_beam_evicts_independently(rule) -> None:
    model, inputs = build("llama"), padded([[3, 5, 7] * 20, [9] * 50])

    with QuireCache(model, RULES[rule], CAP, every=EVERY, page_tokens=4) as cache:
        generate(model, inputs, num_beams=3, past_key_values=cache)
        memory_of(cache).check()

        for row in range(6):
            heads = [head for layer in all_kept(cache, row) for head in layer]
            assert all(CAP - EVERY <= len(head) <= CAP for head in heads)


def test_a_repeated_row_shares_its_prompt() -> None:
    model = build("llama")
    with QuireCache(model, page_tokens=4) as cache:
        model(torch.tensor([[3, 5, 7, 9] * 8]), past_key_values=cache)
        alone = cache.kv_used_bytes

        cache.batch_repeat_interleave(4)

        assert cache.kv_used_bytes == alone
        assert cache.batch_size == 4
