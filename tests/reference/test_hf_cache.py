"""QuireCache in Transformers' generate: its tokens, and the retained sets of the engine.

With codecs, streaming, turns, crop and assisted decoding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quire.engine.core import Engine
from quire.errors import ConfigError, RequestError, UnknownName, UnsoundCombination
from quire.hf import QuireCache
from quire.hf.cache import retained_positions
from quire.kv.memory import KVMemory
from quire.policies import recommended
from support import zoo
from support.engines import answer, load, make_prompts, requests_of
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


@contextmanager
def cached(model: PreTrainedModel, *rule: object, **options: object) -> Iterator[QuireCache]:
    with QuireCache(model, *rule, **options) as cache:
        yield cache
        memory_of(cache).check()


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    rows = [[PAD] * n + prompt for n, prompt in zip(pads, prompts, strict=True)]
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in pads])
    return {"input_ids": torch.tensor(rows), "attention_mask": mask}


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
def test_a_large_budget_gives_the_tokens_of_transformers(name, policy):
    # with pads, Llama 4 in Transformers counts them in the positions that scale its queries
    model, inputs = build(name), padded(PROMPTS[:1] if name == "llama4" else PROMPTS)
    limit, new = (24, 4) if name == "phi3_longrope" else (200, NEW_TOKENS)
    inputs = {key: value[:, -20:] for key, value in inputs.items()} if limit == 24 else inputs
    with cached(model, policy, max_tokens=limit) as cache:
        got = generate(model, inputs, max_new_tokens=new, past_key_values=cache)
    assert torch.equal(got, generate(model, inputs, max_new_tokens=new))


LONG = [prompt for prompt in make_prompts(5, 60, seed=3) if len(prompt) > CAP]
UNLIKE, BOTH, END = ("gemma3", "mimo_v2_flash", "llama4"), "prefill_and_decode", "prefill_end"
WITH_CODECS = [
    *(("llama", "full", "int8"), ("llama", "full", "int4+residual=8")),
    *(("llama", "full", "int4_page/int8"), ("gemma3", "full", "int8+sinks=2+residual=8")),
    *(("llama", "h2o:recent=8", "int8"), ("llama", "snapkv:window=6", "int4+residual=8")),
    *(("gemma3", "recent:sinks=2", "int8/int4"), ("gemma4", "full", "int8+sinks=2+residual=8")),
    *(("llama4", "snapkv:window=6", "int8"),),
    *((name, "streaming:sinks=2", "none") for name in ("llama", "gemma2")),
]


@pytest.mark.parametrize(
    ("name", "rule", "when", "codec"),
    [
        *(("llama", rule, BOTH, "none") for rule in RULES.values()),
        *((n, RULES["h2o"], BOTH, "none") for n in (*UNLIKE, "deepseek_v3")),
        *((n, RULES["snapkv"], BOTH, "none") for n in ("gpt2", "gemma4", "deepseek_v3")),
        *(("llama", RULES[rule], w, "none") for rule, w in (("h2o", END), ("average", "decode"))),
        *((name, rule, BOTH, codec) for name, rule, codec in WITH_CODECS),
    ],
)
def test_retained_sets_and_tokens_equal_those_of_the_engine(name, rule, when, codec):
    evict = rule if rule == "full" else f"{rule},cap={CAP},every={EVERY},when={when}"
    budget = {} if rule == "full" else {"budget": CAP, "every": EVERY, "when": when}
    model = build(name)
    with cached(model, rule, codec=codec, max_tokens=200, **budget) as cache:
        tokens = generate(model, padded(LONG), past_key_values=cache).tolist()
        kept = [all_kept(cache, row) for row in range(len(LONG))]

    assert list(zip(tokens, kept, strict=True)) == engine_kept(name, evict, LONG, codec=codec)
    heads = [len(head) for row in kept for layer in row for head in layer]
    assert rule == "full" or min(heads) < CAP + NEW_TOKENS


def engine_kept(
    name: str, evict: str, prompts: list[list[int]], codec: str = "none"
) -> list[tuple[list[int], object]]:
    """Tokens of an engine, and the retained positions of each request after its last token."""
    if "," in evict and ":" not in evict:
        evict = evict.replace(",", ":", 1)
    model, kept = load(name), {}
    options = {"evict": evict, "codec": codec, "enable_prefix_caching": False}
    engine = Engine(model, kv_config(memory="16MiB", **options))

    def note(engine):
        for request in engine.scheduler.running:
            if len(request.output_token_ids) == NEW_TOKENS:
                row, layers = request.memory.row, range(model.spec.num_layers)
                kept[request.request_id] = [
                    retained_positions(engine.pool.kv, row, layer) for layer in layers
                ]

    numbered = {str(i): prompt for i, prompt in enumerate(prompts)}
    tokens = answer(engine, requests_of(numbered, NEW_TOKENS + 1), before_step=note).tokens
    return [(tokens[name, 0][:NEW_TOKENS], kept[name]) for name in numbered]


@pytest.mark.parametrize(
    ("budget", "ratio", "cap"), [(64, None, 64), ("50%", None, 150), (None, 0.5, 150)]
)
def test_a_budget_alone_is_enough(budget, ratio, cap):
    """64 tokens, and half of 300: close to the budget is retained with every schedule."""
    model = build("llama")
    prompt = [[2 + i % 90 for i in range(300)]]
    with QuireCache(model, "h2o", budget, compression_ratio=ratio) as cache:
        generate(model, padded(prompt), past_key_values=cache)
        kept = all_kept(cache, 0)
    assert all(7 * cap // 8 <= len(head) <= cap for layer in kept for head in layer)


@pytest.mark.parametrize("rule", ["recent", "h2o"])
def test_the_peak_is_the_cap_for_prompts_ten_times_as_long(rule):
    model = build("llama")
    prompts = [[3, 5, 7] * (10 * CAP // 3), [9] * (10 * CAP)]

    with QuireCache(model, RULES[rule], CAP, every=EVERY, page_tokens=4) as cache:
        generate(model, padded(prompts), past_key_values=cache)
        memory = memory_of(cache)
        groups = memory.layout.groups

        assert 0 < cache.kv_used_bytes <= cache.kv_peak_bytes
        assert cache.kv_peak_bytes <= 2 * sum(group.bytes_at_most(CAP, 1) for group in groups)
        assert cache.get_seq_length() == 10 * CAP + NEW_TOKENS - 1


def test_under_pressure_no_token_is_evicted_while_pages_are_free():
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


def test_logits_are_in_order_and_chunked_prefill_retains_at_most_the_cap():
    model, inputs = build("llama"), padded(PROMPTS)
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).logits

    with QuireCache(model) as cache:
        got = model(**inputs, past_key_values=cache).logits

    assert (got[seen] - expected[seen]).abs().max() <= 1e-4
    assert not got[~seen].any()

    model, inputs = build("llama"), padded([[3, 5, 7] * 20])
    for chunk in (None, 7):
        with QuireCache(model, "recent", CAP, every=EVERY) as cache:
            generate(model, inputs, past_key_values=cache, prefill_chunk_size=chunk)
            assert max(map(len, cache.retained_positions(0, 0))) <= CAP


@pytest.mark.parametrize("policy", ["full", "h2o:cap=200"])
def test_beams_equal_transformers_and_share_pages(policy):
    model, inputs = build("llama"), padded(PROMPTS[:2])
    expected = generate(model, inputs, num_beams=3)

    with QuireCache(model, policy, page_tokens=4) as cache:
        got = generate(model, inputs, num_beams=3, past_key_values=cache)
        memory_of(cache).check()

        assert cache.batch_size == 6
        assert torch.equal(got, expected)


@pytest.mark.parametrize("rule", ["recent", "h2o"])
def test_each_beam_evicts_independently(rule):
    model, inputs = build("llama"), padded([[3, 5, 7] * 20, [9] * 50])

    with QuireCache(model, RULES[rule], CAP, every=EVERY, page_tokens=4) as cache:
        generate(model, inputs, num_beams=3, past_key_values=cache)
        memory_of(cache).check()

        for row in range(6):
            heads = [head for layer in all_kept(cache, row) for head in layer]
            assert all(CAP - EVERY <= len(head) <= CAP for head in heads)


def test_a_repeated_row_shares_its_prompt():
    model = build("llama")
    with QuireCache(model, page_tokens=4) as cache:
        model(torch.tensor([[3, 5, 7, 9] * 8]), past_key_values=cache)
        alone = cache.kv_used_bytes

        cache.batch_repeat_interleave(4)

        assert cache.kv_used_bytes == alone
        assert cache.batch_size == 4


# ---- codecs and streaming ------------------------------------------------------------------------

REPEATED = [[3, 5, 7, 11, 13, 17] * 6]  # prompt lookup finds candidates


def test_codecs_divide_bytes_and_streaming_generates_beyond_the_context():
    model, peaks = build("llama"), {}
    for codec in ("none", "int8"):
        with QuireCache(model, codec=codec, max_tokens=200) as cache:
            generate(model, padded(PROMPTS), past_key_values=cache)
            peaks[codec] = cache.kv_peak_bytes
    assert peaks["int8"] < 0.5 * peaks["none"]  # float32 model
    for codec in ("int5", "kvquant4"):
        with pytest.raises((ConfigError, UnknownName)):
            QuireCache(build("llama"), codec=codec)
    with pytest.raises(UnsoundCombination, match="learned positions"):
        QuireCache(build("gpt2"), "streaming", CAP)

    model = build("llama")
    model.config.max_position_embeddings = 48
    with QuireCache(model, "streaming:sinks=2", CAP, every=EVERY, max_tokens=200) as cache:
        generate(model, padded([LONG[0]]), max_new_tokens=120, past_key_values=cache)

        assert len(cache.retained_positions(0, 0)[0]) <= CAP
        assert cache.retained_positions(0, 0)[0][:2] == [0, 1]


@pytest.mark.parametrize(
    ("first", "budget", "chosen"),
    [
        ("tova", "50%", "tova"),
        ("recent:budget=(duo:scores=smollm2)", "50%", "keydiff"),
        ("lagkv", 64, "keydiff"),  # below its sinks and two lags
    ],
)
def test_auto_is_the_first_recommended_rule_that_fits_model_and_cap(
    monkeypatch, first, budget, chosen
):
    monkeypatch.setattr(recommended, "RECOMMENDED", (first, "keydiff"))
    with QuireCache(build("llama"), "auto", budget) as cache:
        assert f"'{chosen}:cap={budget}'" in repr(cache)


# ---- turns ---------------------------------------------------------------------------------------

TURN = [11, 13, 19, 23, 29, 31, 37]


def two_turns(model, cache, first, turn=TURN, **options):
    known = {"input_ids": first}
    reply = generate(model, known, max_new_tokens=5, past_key_values=cache)
    both = torch.cat([first, reply, torch.tensor([turn] * len(first))], dim=1)
    return generate(model, {"input_ids": both}, past_key_values=cache, **options), both


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("policy", ["full", "h2o:cap=200"])
def test_a_second_call_continues_with_the_cache_of_the_first(name, policy):
    model, first = build(name), torch.tensor([[3, 5, 7] * 10, [2, 4, 8] * 10])
    with QuireCache(model, policy, max_tokens=200) as cache:
        got, both = two_turns(model, cache, first)
    assert torch.equal(got, generate(model, {"input_ids": both}))


def test_a_second_call_continues_with_quantized_keys_and_values_of_the_first():
    model, first = build("llama"), torch.tensor([[3, 5, 7] * 10])
    with QuireCache(model, codec="int8", max_tokens=200) as cache:
        got, both = two_turns(model, cache, first)

    expected = engine_kept("llama", "full", both.tolist(), codec="int8")
    assert got.tolist() == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("when", ["prefill_and_decode", "prefill_end", "decode"])
@pytest.mark.parametrize("rule", ["recent:sinks=2", "h2o:recent=8", "snapkv:window=6"])
def test_each_turn_is_a_prompt_of_the_schedule(rule, when):
    model, first = build("llama"), torch.tensor([[3, 5, 7] * 20])
    with QuireCache(model, rule, CAP, every=EVERY, when=when) as cache:
        two_turns(model, cache, first, TURN * 5, max_new_tokens=1)
        held = [len(head) for layer in all_kept(cache, 0) for head in layer]
    assert max(held) <= CAP + (when == "decode") * 7 * 5


def test_a_fraction_is_that_of_a_prompt_after_its_prefill_and_of_all_turns():
    model, first = build("llama"), torch.tensor([[3, 5, 7] * 20])
    with QuireCache(model, "h2o", "25%", when="prefill_end") as cache:
        model(torch.tensor([[3, 5, 7, 9] * 20]), past_key_values=cache)
        assert {len(head) for head in cache.retained_positions(0, 1)} == {20}
    with QuireCache(model, "recent", "50%", when="prefill_end") as cache:
        two_turns(model, cache, first, TURN * 10, max_new_tokens=1)

        assert len(cache.retained_positions(0, 0)[0]) == (60 + 5 + 70) // 2


# ---- crop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), [("llama", "full"), ("llama", "recent:cap=100")])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_cropped_cache_continues_as_if_the_tokens_had_never_been_passed(name, policy, tokens):
    model = build(name)
    prompt, other = torch.tensor([[3, 5, 7] * 10]), torch.tensor([[2, 9, 4]])
    with cached(model, policy, max_tokens=200) as cache, torch.no_grad():
        model(prompt, past_key_values=cache)
        cache.crop(-tokens)
        assert cache.get_seq_length() == 30 - tokens
        got = model(other, past_key_values=cache).logits
        expected = model(torch.cat([prompt[:, :-tokens], other], dim=1)).logits[:, -3:]
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("policy", ["recent", "h2o"])
def test_crop_after_an_eviction_is_refused(policy):
    model = build("llama")
    with QuireCache(model, policy, CAP, every=EVERY) as cache, torch.no_grad():
        model(torch.tensor([[3, 5, 7] * 20]), past_key_values=cache)
        for tokens, error, says in (
            (-1, UnsoundCombination, "activate_past_recording"),
            (3, RequestError, "negative"),
            (-61, RequestError, "at most 60"),
        ):
            with pytest.raises(error, match=says):
                cache.crop(tokens)


@pytest.mark.parametrize(("name", "policy"), [("llama", "h2o:cap=100"), ("bamba", "full")])
def test_crop_of_summed_attention_or_of_recurrent_states_is_refused(name, policy):
    model, prompt = build(name), torch.tensor([[3, 5, 7] * 10])
    with QuireCache(model, policy, max_tokens=200) as cache, torch.no_grad():
        model(prompt, past_key_values=cache)
        with pytest.raises(UnsoundCombination, match="recurrent states before"):
            cache.crop(-3)


@pytest.mark.parametrize("policy", ["recent:sinks=2", "h2o:recent=8", "snapkv:window=6"])
@pytest.mark.parametrize("removed", [0, 3, 10])
def test_candidates_that_are_removed_leave_no_trace(policy, removed):
    """Also if they made the rule evict, and if the rule counts their attention."""
    model = build("llama")
    prompt, new = torch.tensor([[3, 5, 7] * 20]), torch.tensor([list(range(40, 51))])
    kept = []
    for candidates in (removed, 0):
        with cached(model, policy, CAP, every=EVERY) as cache, torch.no_grad():
            model(prompt, past_key_values=cache)
            if candidates:
                cache.activate_past_recording()
                model(new, past_key_values=cache)
                cache.crop(-candidates)
                assert cache.get_seq_length() == 60 + 11 - candidates
            else:
                for token in new[0, : 11 - removed]:
                    model(token.view(1, 1), past_key_values=cache)
            logits = model(torch.tensor([[9]]), past_key_values=cache).logits
            kept.append((all_kept(cache, 0), logits))

    assert kept[0][0] == kept[1][0]
    assert (kept[0][1] - kept[1][1]).abs().max() <= 1e-4


# ---- assisted decoding ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_decoding_without_eviction_gives_the_tokens_of_transformers(name):
    model, inputs, options = build(name), padded(REPEATED), {"max_new_tokens": 30}
    with cached(model, max_tokens=200) as cache:
        got = generate(model, inputs, past_key_values=cache, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(got, generate(model, inputs, **options))


@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        *((rule, "none") for rule in ("recent:sinks=2", "h2o:recent=8", "streaming:sinks=2")),
        *(("snapkv:window=6", "int8"), ("full", "int4+residual=8")),
    ],
)
@pytest.mark.parametrize("assistant", [False, True])
def test_assisted_decoding_gives_the_tokens_without_assistant(policy, codec, assistant):
    model, inputs, outputs = build("llama"), padded(REPEATED), []
    budget = {} if policy == "full" else {"budget": CAP, "every": EVERY}
    helper = {"assistant_model": build("llama")} if assistant else {"prompt_lookup_num_tokens": 4}
    for options in ({}, helper):
        with cached(model, policy, codec=codec, max_tokens=200, **budget) as cache:
            options = options | {"max_new_tokens": 30, "past_key_values": cache}
            outputs.append(generate(model, inputs, **options))
    assert torch.equal(*outputs)


def test_a_conversation_with_assisted_decoding_equals_one_without():
    model, first, outputs = build("llama"), torch.tensor(REPEATED), []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        with QuireCache(model, "h2o:recent=8", CAP, every=EVERY) as cache:
            outputs.append(two_turns(model, cache, first, **options)[0])
    assert torch.equal(*outputs)
    assert outputs[0].shape[1] == NEW_TOKENS
