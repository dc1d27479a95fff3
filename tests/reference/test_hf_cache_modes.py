"""QuireCache with codecs, streaming, turns, crop and assisted decoding.

Against Transformers where exact, against the engine or the same cache where tokens are evicted.
"""

import pytest
import torch

from quire.errors import ConfigError, RequestError, UnknownName, UnsoundCombination
from quire.hf import QuireCache
from reference.test_hf_cache import (
    CAP,
    EVERY,
    NEW_TOKENS,
    PAD,
    PROMPTS,
    all_kept,
    build,
    engine_kept,
    generate,
    memory_of,
    padded,
)
from support.engines import make_prompts

REPEATED = [[3, 5, 7, 11, 13, 17] * 6]  # prompt lookup finds candidates
LONG = [prompt for prompt in make_prompts(5, 60, seed=3) if len(prompt) > CAP]


def close_to_engine(name, rule, codec, prompts=LONG):
    evict = rule if rule == "full" else f"{rule},cap={CAP},every={EVERY}"
    expected = engine_kept(name, evict, prompts, codec=codec)
    model = build(name)
    budget = {} if rule == "full" else {"budget": CAP, "every": EVERY}
    with QuireCache(model, rule, codec=codec, max_tokens=200, **budget) as cache:
        tokens = generate(model, padded(prompts), past_key_values=cache).tolist()
        kept = [all_kept(cache, row) for row in range(len(prompts))]
        memory_of(cache).check()
    assert list(zip(tokens, kept, strict=True)) == expected


# ---- codecs and streaming ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "codec"),
    [
        ("llama", "full", "int8"),
        ("llama", "full", "int4+residual=8"),
        ("llama", "full", "int4_page/int8"),
        ("gemma3", "full", "int8+sinks=2+residual=8"),
        ("llama", "h2o:recent=8", "int8"),
        ("llama", "snapkv:window=6", "int4+residual=8"),
        ("gemma3", "recent:sinks=2", "int8/int4"),
        ("gemma4", "full", "int8+sinks=2+residual=8"),
        ("llama4", "snapkv:window=6", "int8"),
    ],
)
def test_codecs_give_the_tokens_and_retained_sets_of_the_engine(name, rule, codec):
    close_to_engine(name, rule, codec)


def test_a_codec_divides_the_bytes():
    model, peaks = build("llama"), {}
    for codec in ("none", "int8"):
        with QuireCache(model, codec=codec, max_tokens=200) as cache:
            generate(model, padded(PROMPTS), past_key_values=cache)
            peaks[codec] = cache.kv_peak_bytes

    assert peaks["int8"] < 0.5 * peaks["none"]  # float32 model


@pytest.mark.parametrize("codec", ["int5", "kvquant4"])
def test_an_unknown_codec_and_one_without_constants_are_refused(codec):
    with pytest.raises((ConfigError, UnknownName)):
        QuireCache(build("llama"), codec=codec)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_streaming_gives_the_tokens_and_retained_sets_of_the_engine(name):
    close_to_engine(name, "streaming:sinks=2", "none")


def test_streaming_generates_beyond_the_context_of_the_model():
    model = build("llama")
    model.config.max_position_embeddings = 48
    with QuireCache(model, "streaming:sinks=2", CAP, every=EVERY, max_tokens=200) as cache:
        generate(model, padded([LONG[0]]), max_new_tokens=120, past_key_values=cache)

        assert len(cache.retained_positions(0, 0)[0]) <= CAP
        assert cache.retained_positions(0, 0)[0][:2] == [0, 1]


def test_streaming_is_refused_for_models_without_rope():
    with pytest.raises(UnsoundCombination, match="learned positions"):
        QuireCache(build("gpt2"), "streaming", CAP)


# ---- turns ---------------------------------------------------------------------------------------

TURN = [11, 13, 19, 23, 29, 31, 37]


def two_turns(model, cache, first, turn=TURN, **options):
    answer = model.generate(
        first, max_new_tokens=5, do_sample=False, pad_token_id=PAD, past_key_values=cache
    )
    both = torch.cat([answer, torch.tensor([turn] * len(first))], dim=1)
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


def test_a_fraction_is_that_of_all_turns():
    model, first = build("llama"), torch.tensor([[3, 5, 7] * 20])
    with QuireCache(model, "recent", "50%", when="prefill_end") as cache:
        two_turns(model, cache, first, TURN * 10, max_new_tokens=1)

        assert len(cache.retained_positions(0, 0)[0]) == (60 + 5 + 70) // 2


# ---- crop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), [("llama", "full"), ("llama", "recent:cap=100")])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_cropped_cache_continues_as_if_the_tokens_had_never_been_passed(name, policy, tokens):
    model = build(name)
    prompt, other = torch.tensor([[3, 5, 7] * 10]), torch.tensor([[2, 9, 4]])
    with QuireCache(model, policy, max_tokens=200) as cache, torch.no_grad():
        model(prompt, past_key_values=cache)
        cache.crop(-tokens)
        assert cache.get_seq_length() == 30 - tokens
        got = model(other, past_key_values=cache).logits
        memory_of(cache).check()
        expected = model(torch.cat([prompt[:, :-tokens], other], dim=1)).logits[:, -3:]

    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("policy", ["recent", "h2o"])
def test_crop_after_an_eviction_is_refused(policy):
    model = build("llama")
    with QuireCache(model, policy, CAP, every=EVERY) as cache, torch.no_grad():
        model(torch.tensor([[3, 5, 7] * 20]), past_key_values=cache)
        with pytest.raises(UnsoundCombination, match="activate_past_recording"):
            cache.crop(-1)
        with pytest.raises(RequestError, match="negative"):
            cache.crop(3)
        with pytest.raises(RequestError, match="at most 60"):
            cache.crop(-61)


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
        with QuireCache(model, policy, CAP, every=EVERY) as cache, torch.no_grad():
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
            memory_of(cache).check()

    assert kept[0][0] == kept[1][0]
    assert (kept[0][1] - kept[1][1]).abs().max() <= 1e-4


# ---- assisted decoding ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted_decoding_without_eviction_gives_the_tokens_of_transformers(name):
    model, inputs = build(name), padded(REPEATED)
    with QuireCache(model, max_tokens=200) as cache:
        got = generate(
            model, inputs, max_new_tokens=30, past_key_values=cache, prompt_lookup_num_tokens=4
        )
        memory_of(cache).check()

    assert torch.equal(got, generate(model, inputs, max_new_tokens=30))


@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        ("recent:sinks=2", "none"),
        ("h2o:recent=8", "none"),
        ("snapkv:window=6", "int8"),
        ("streaming:sinks=2", "none"),
        ("full", "int4+residual=8"),
    ],
)
@pytest.mark.parametrize("assistant", [False, True])
def test_assisted_decoding_gives_the_tokens_without_assistant(policy, codec, assistant):
    model, inputs = build("llama"), padded(REPEATED)
    budget = {} if policy == "full" else {"budget": CAP, "every": EVERY}
    helper = {"assistant_model": build("llama")} if assistant else {"prompt_lookup_num_tokens": 4}
    outputs = []
    for options in ({}, helper):
        with QuireCache(model, policy, codec=codec, max_tokens=200, **budget) as cache:
            outputs.append(
                generate(model, inputs, max_new_tokens=30, past_key_values=cache, **options)
            )
            memory_of(cache).check()

    assert torch.equal(*outputs)


def test_a_conversation_with_assisted_decoding_equals_one_without():
    model, first = build("llama"), torch.tensor(REPEATED)
    outputs = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        with QuireCache(model, "h2o:recent=8", CAP, every=EVERY) as cache:
            outputs.append(two_turns(model, cache, first, **options)[0])

    assert torch.equal(*outputs)
    assert outputs[0].shape[1] == NEW_TOKENS
