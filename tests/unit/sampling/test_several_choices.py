import random
from dataclasses import replace
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, RequestError
from quire.sampling.beam import BeamSearch, Candidate
from quire.sampling.outputs import OutputBuilder
from quire.sampling.sampler import Sampler
from support import engines, zoo

PROMPT = list(range(5, 26))  # 21 tokens
END = 9


@pytest.fixture(scope="module", params=["llama", "qwen2_window"])
def model(request):
    return engines.load(request.param)


@pytest.fixture(scope="module")
def llama():
    return engines.load("llama")


def engine_of(model, *, num_sequences=8.0, longest=40, **kv) -> Engine:
    return engines.engine_for(model, room=num_sequences, longest=longest, page_tokens=4, **kv)


def drawn(**options) -> SamplingParams:
    defaults = {"max_tokens": 10, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def run_one(engine, params, prompt=PROMPT):
    return run_all(engine, [(prompt, params)])[0]


def run_all(engine, batch):
    builders, done = {}, {}
    for prompt, params in batch:
        request_id = engine.submit(GenerationRequest(prompt, params))
        builders[request_id] = OutputBuilder(request_id, tuple(prompt))
    while engine.has_work:
        for delta in engine.step():
            output = builders[delta.request_id].add(delta)
            if output is not None:
                done[delta.request_id] = output
    engine.check()
    return [done[request_id] for request_id in builders]


def beams(**options) -> SamplingParams:
    defaults = {"n": 2, "use_beam_search": True, "max_tokens": 6, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def run_single(model, seed, **options):
    return run_one(engine_of(model), drawn(seed=seed, **options))


def steps_of(engine, params):
    engine.submit(GenerationRequest(PROMPT, params, request_id="r"))
    return [engine.step() for _ in iter(lambda: engine.has_work, False)]


def pages_of(engine):
    """Pages that fit in the memory, and the bytes of one."""
    memory = engine.pool.kv.memory
    page_bytes = memory.layout.page_classes[0].page_bytes
    return memory.total_bytes // page_bytes, page_bytes


@cache
def alone(model, seed: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
    params = drawn(seed=seed, max_tokens=16)
    return run_one(engine_of(model), params, prompt=list(prompt)).token_ids


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"n": 4}, {"n": 2, "use_beam_search": True, "temperature": 0.0}],
    ids=["greedy", "sampled", "beams"],
)
def test_tokens_that_the_tokenizer_lacks_are_not_generated(llama, options):
    vocab = {letter: i for i, letter in enumerate("abcdefghijklmnop")}  # of 128 tokens
    plain = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="a")
    small = replace(llama, tokenizer=tokenizer)
    params = SamplingParams(**{"max_tokens": 10, "seed": 5, "prompt_logprobs": 2} | options)

    output = run_one(engine_of(small), params)

    assert all(token < len(vocab) for choice in output.choices for token in choice.token_ids)
    tops = [token for scored in output.prompt_logprobs[1:] for token, _ in scored.top_logprobs]
    assert max(tops) < len(vocab)


# ---- outputs -----------------------------------------------------------------------------------


def test_choices_equal_runs_with_their_seeds_of_one_prefilled_prompt(model, llama):
    together = run_one(engine_of(model), drawn(n=4))
    singles = [run_single(model, seed) for seed in range(5, 9)]
    assert [choice.token_ids for choice in together.choices] == [o.token_ids for o in singles]
    assert len({choice.token_ids for choice in together.choices}) > 1
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.token_ids == together.choices[0].token_ids
    assert {choice.finish_reason for choice in together.choices} == {"length"}

    engine = engine_of(llama, enable_prefix_caching=False)

    usage = run_one(engine, drawn(n=4)).usage

    assert engine.num_processed_tokens == len(PROMPT) + 4 * 9  # the last token is never processed
    assert engine.num_generated_tokens == 40
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 40)
    deltas = [d for step in steps_of(engine_of(llama), drawn(n=2, max_tokens=3)) for d in step]
    assert {delta.request_id for delta in deltas} == {"r"}
    assert [delta.index for delta in deltas] == [0, 1] * 3
    assert [delta.is_last for delta in deltas] == [False] * 5 + [True]
    assert [delta.finish_reason for delta in deltas[-2:]] == ["length"] * 2


def test_choices_differ_without_a_seed_and_best_of_returns_the_max_likely_in_order(llama):
    best = run_one(engine_of(llama), drawn(n=2, best_of=5))
    candidates = [run_single(llama, seed, logprobs=0) for seed in range(5, 10)]
    ranked = sorted(candidates, key=lambda o: -sum(token.logprob for token in o.logprobs))

    assert [choice.token_ids for choice in best.choices] == [o.token_ids for o in ranked[:2]]
    assert [choice.score for choice in best.choices] == pytest.approx(
        [o.score for o in ranked[:2]], abs=1e-4
    )
    assert best.choices[0].score > best.choices[1].score
    assert best.logprobs is None  # not requested
    assert best.usage.completion_tokens == 50  # includes dropped choices

    done = run_one(engine_of(llama), drawn(n=4, seed=None))
    choices = {choice.token_ids for choice in done.choices}
    assert len(choices) > 1
    assert {len(tokens) for tokens in choices} == {10}


def test_ranked_choices_follow_their_ends_and_scores_no_best_choice(llama):
    ranked = steps_of(engine_of(llama), drawn(n=1, best_of=2, logprobs=1, max_tokens=4))
    searched = steps_of(engine_of(llama), beams(n=2, beam_width=3))

    assert [len(deltas) for deltas in ranked] == [0] * (len(ranked) - 1) + [1]
    assert len(ranked[-1][0].logprobs) == 4
    assert [len(deltas) for deltas in searched] == [0] * 5 + [2]
    assert [delta.index for delta in searched[-1]] == [0, 1]
    assert [delta.is_last for delta in searched[-1]] == [False, True]

    # one of four choices is returned, which is not always the first
    single, *best = (
        run_one(engine_of(llama), drawn(prompt_logprobs=0, **options))
        for options in ({}, *({"best_of": 4, "seed": seed} for seed in range(5, 10)))
    )

    scored = [[s and s.token_id for s in one.prompt_logprobs] for one in (single, *best)]
    assert scored == scored[:1] * 6


def test_choices_are_scored_once_and_end_independently(llama):
    together, single, untold = (
        run_one(engine_of(llama), params)
        for params in (
            drawn(n=3, prompt_logprobs=1),
            drawn(prompt_logprobs=1),
            SamplingParams(n=3, max_tokens=0, prompt_logprobs=0),
        )
    )
    expected = [score.logprob for score in single.prompt_logprobs[1:]]

    assert len(together.prompt_logprobs) == len(untold.prompt_logprobs) == len(PROMPT)
    found = [score.logprob for score in together.prompt_logprobs[1:]]
    assert found == pytest.approx(expected, abs=1e-4)
    assert [choice.finish_reason for choice in untold.choices] == ["length"] * 3

    unstopped = [run_single(llama, seed).token_ids for seed in range(5, 9)]
    stop = unstopped[1][3]

    together = run_one(engine_of(llama), drawn(n=4, stop_token_ids=[stop]))

    for choice, tokens in zip(together.choices, unstopped, strict=True):
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert choice.token_ids == tokens[:cut]
        assert choice.finish_reason == ("stop" if stop in tokens else "length")


# ---- pages -------------------------------------------------------------------------------------


def test_only_the_partly_filled_page_is_copied(llama):
    """21 prompt tokens fill 5 pages of 4 and a quarter of a sixth in each of the 2 layers. The
    four sequences then write into the sixth: three copy it, and the last keeps it. At 30 tokens
    each sequence has 8 pages, 5 of them shared: 5 + 4 * 3 = 17 in each layer.
    """
    engine = engine_of(llama, enable_prefix_caching=False)
    memory = engine.pool.kv.memory
    copies = memory.store = Mock(wraps=memory.store)
    usage = run_one(engine, drawn(n=4)).usage

    num_copied = [len(call.args[1]) for call in copies.copy_pages.call_args_list]
    assert sum(num_copied) == 3 * 2
    assert memory.arena_peak_bytes == usage.kv_peak_bytes == 17 * 2 * pages_of(engine)[1]


# ---- cancelling --------------------------------------------------------------------------------


def cancelled(engine, params, after_steps, *index):
    engine.submit(GenerationRequest(PROMPT, params, request_id="r"))
    deltas = [delta for _ in range(after_steps) for delta in engine.step()]
    engine.cancel("r", *index)
    while engine.has_work:
        deltas += engine.step()
    engine.check()
    builder = OutputBuilder("r", tuple(PROMPT))
    [output] = [output for delta in deltas if (output := builder.add(delta)) is not None]
    return output


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("after_steps", [0, 1, 4])
def test_one_choice_can_be_cancelled(llama, index, after_steps):
    output = cancelled(engine_of(llama, chunk_tokens=8), drawn(n=3), after_steps, index)

    for choice in output.choices:
        expected = run_single(llama, 5 + choice.index).token_ids
        if choice.index == index:
            assert choice.finish_reason == "abort"
            assert choice.token_ids == expected[: len(choice.token_ids)]
        else:
            assert choice.token_ids == expected


@pytest.mark.parametrize("after_steps", [0, 1, 3])
@pytest.mark.parametrize(
    ("params", "index"),
    [(drawn(n=3), ()), (drawn(n=3, best_of=3), ()), (beams(beam_width=4), (1,))],
)
def test_all_choices_can_be_cancelled(llama, after_steps, params, index):
    output = cancelled(engine_of(llama, chunk_tokens=8), params, after_steps, *index)
    assert [choice.finish_reason for choice in output.choices] == ["abort"] * params.n


def test_request_id_is_reusable_after_all_choices_have_ended(llama):
    engine = engine_of(llama)
    engine.submit(GenerationRequest(PROMPT, drawn(n=2), request_id="r"))
    with pytest.raises(RequestError, match="request id 'r' is in use"):
        engine.submit(GenerationRequest(PROMPT, drawn(), request_id="r"))

    while engine.has_work:
        engine.step()

    assert engine.submit(GenerationRequest(PROMPT, drawn(), request_id="r")) == "r"


# ---- under pressure ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_groups_resume_with_equal_choices(model, prefix_cache):
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randint(3, 24))] for _ in range(6)]
    options = [drawn(n=rng.randint(1, 4), seed=seed, max_tokens=16) for seed in range(6)]
    engine = engine_of(model, num_sequences=3.6, longest=40, enable_prefix_caching=prefix_cache)

    results = run_all(engine, list(zip(prompts, options, strict=True)))

    assert engine.scheduler.num_preemptions > 3
    for prompt, params, result in zip(prompts, options, results, strict=True):
        for choice in result.choices:
            seed = params.seed + choice.index
            assert choice.token_ids == alone(model, seed, tuple(prompt))
    assert any(result.usage.preemptions for result in results)


def test_pages_are_shared_again_after_a_preemption(llama):
    engine = engine_of(llama, enable_prefix_caching=False)
    engine.submit(GenerationRequest(PROMPT, drawn(n=4), request_id="r"))
    for _ in range(6):
        engine.step()
    memory, processed = engine.pool.kv.memory, engine.num_processed_tokens
    before = memory.used_bytes
    num_tokens = [r.num_tokens for r in engine.scheduler.running]
    engine.scheduler.lifecycle.preempt(engine.scheduler.running[2], "forced")
    assert len(memory.live_rows) == 0

    engine.step()  # the first recomputes its tokens up to the fork
    while len(engine.scheduler.running) < 4 or any(
        r.num_uncomputed > 1 for r in engine.scheduler.running
    ):
        engine.step()

    assert memory.used_bytes <= before + 4 * memory.layout.smallest_sequence_bytes
    assert engine.num_processed_tokens - processed < sum(num_tokens) - 2 * len(PROMPT)
    while engine.has_work:
        engine.step()
    engine.check()


# ---- too many at once --------------------------------------------------------------------------


def test_group_runs_together_if_its_pages_fit_and_else_separately(llama):
    """30 tokens take 8 pages in each of 2 layers, of which the sequences share 5: n of them need
    (5 + 3 n) * 2 pages. Three sequences of 30 tokens without sharing need 48 pages.
    """
    engine = engine_of(llama, num_sequences=3.0, longest=30)
    largest = (pages_of(engine)[0] // 2 - 5) // 3

    for n, fits in ((largest, True), (largest + 1, False)):
        engine.submit(GenerationRequest(PROMPT, drawn(n=n), request_id="r"))
        assert engine.scheduler.num_waiting == (1 if fits else n)
        engine.cancel("r")
        engine.step()
        assert len(run_one(engine, drawn(n=n)).choices) == n


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 1}, {"num_sequences": 1.2}, {"max_num_seqs": 3}]
)
def test_choices_that_cannot_run_together_are_equal_and_count_concurrent_pages(llama, limits):
    """At any time five choices hold at most the memory of 1.2 sequences, or of one."""
    engine = engine_of(llama, **limits)
    together = run_one(engine, drawn(n=5))
    singles = [run_single(llama, seed) for seed in range(5, 10)]
    peak_bytes, single_bytes = together.usage.kv_peak_bytes, singles[0].usage.kv_peak_bytes

    assert [choice.token_ids for choice in together.choices] == [one.token_ids for one in singles]
    assert single_bytes <= peak_bytes <= engine.pool.kv.memory.total_bytes
    if limits == {"max_num_seqs": 1}:
        assert peak_bytes == single_bytes
    if limits == {"max_num_seqs": 3}:
        assert single_bytes + 2 * 2 * pages_of(engine)[1] <= peak_bytes <= 3 * single_bytes


def test_never_fitting_requests_and_beams_are_refused_completely(llama):
    engine = engine_of(llama, num_sequences=1.0, longest=30)
    with pytest.raises(NeverFits):
        engine.submit(GenerationRequest(PROMPT, drawn(n=3, max_tokens=100)))
    assert not engine.has_work
    assert len(run_one(engine, drawn(n=3, max_tokens=8)).choices) == 3

    # 26 tokens take 7 pages in each of 2 layers, of which 5 are shared: w beams need 5 + 2 w
    engine = engine_of(llama, num_sequences=2.0, longest=26)
    most = (pages_of(engine)[0] // 2 - 5) // 2
    with pytest.raises(NeverFits, match=f"in {most + 1} beams need .* use fewer beams"):
        engine.submit(GenerationRequest(PROMPT, beams(beam_width=most + 1)))
    assert len(run_one(engine, beams(beam_width=most)).choices) == 2


# ---- beams -------------------------------------------------------------------------------------

SEARCHES = {  # options, candidates of each step: open beams, ended beams with scores, is it done
    "the best open and the best ended beams are retained": (
        *({}, [[(-1.0, 0, END), (-2.0, 0, 3), (-2.5, 0, 4)]]),
        *([[3], [4]], [(-1.0, [END])], False),
    ),
    "an ended candidate beyond the beam width is ignored": (
        *({}, [[(-1.0, 0, 3), (-2.0, 0, 4), (-3.0, 0, END)]]),
        *([[3], [4]], [], False),
    ),
    "scores are divided by the length to the length penalty": (
        {"length_penalty": 2.0},
        [[(-1.0, 0, 3), (-2.0, 0, 4)], [(-6.0, 1, END), (-7.0, 0, 5), (-8.0, 1, 5)]],
        *([[3, 5], [4, 5]], [(-6.0 / 2**2, [4, END])], False),
    ),
    "all beams end at max_tokens": (
        *({"max_tokens": 1}, [[(-1.0, 0, 3), (-2.0, 0, 4)]]),
        *([], [(-1.0, [3]), (-2.0, [4])], True),
    ),
    "fewer candidates give fewer beams": ({}, [[(-1.0, 0, 3)]], [[3]], [], False),
}
# -4.1 over 2 tokens is still better than the worst ended beam, -5 over 1
FULL_LIST = [[(-1.0, 0, END), (-2.0, 0, 3), (-2.1, 0, 4)]]
FULL_LIST += [[(-9.9, 0, END), (-8.1, 0, 5), (-8.2, 1, 5)]]
# ended: -1 and -2 / 2 = -1; open: -6, over its 2 tokens -3, over all 10 it could be -0.6
AT_MAX_TOKENS = [[(-1.0, 0, END), (-1.5, 0, 3), (-1.6, 0, 4)]]
AT_MAX_TOKENS += [[(-2.0, 0, END), (-6.0, 0, 5), (-6.1, 1, 5)]]
STOPPED = [  # early_stopping, max_tokens, candidates, is it done
    *((True, 6, FULL_LIST, True), (False, 6, FULL_LIST, False), ("never", 6, FULL_LIST, False)),
    *((False, 10, AT_MAX_TOKENS, True), ("never", 10, AT_MAX_TOKENS, False)),
]


def search_of(steps, **options) -> BeamSearch:
    search = BeamSearch(beams(stop_token_ids=[END], **options), ())
    for candidates in steps:
        parents = search.advance([Candidate(*candidate) for candidate in candidates])
        assert search.is_done or parents == [parent for _, parent, t in candidates if t != END][:2]
    return search


def test_a_search_retains_the_best_beams_and_ends_by_its_option():
    def tokens(path) -> list[int]:
        return [candidate.token_id for candidate in path]

    for name, (options, steps, opened, ended, done) in SEARCHES.items():
        search = search_of(steps, **options)

        assert search.is_done == done, name
        assert done or [tokens(beam) for beam in search.beams] == opened, name
        assert [(h.score, tokens(h.path)) for h in search.ended] == ended, name
    assert search.scores == [-1.0]

    for early, max_tokens, steps, done in STOPPED:
        search = search_of(steps, early_stopping=early, max_tokens=max_tokens)

        assert (len(search.ended), search.is_done) == (2, done), early


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.7}, "temperature=0.7 is an option of random sampling"),
        ({"top_k": 5}, "top_k=5 is an option of random sampling"),
        ({"top_p": 0.9}, "top_p=0.9 is an option of random sampling"),
        ({"min_p": 0.1}, "min_p=0.1 is an option of random sampling"),
        ({"stop": "x"}, "stop_token_ids"),
        ({"beam_width": 1}, "beam_width=1 is less than n=2"),
        ({"best_of": 1}, "best_of=1 is less than n=2"),
        ({"best_of": 3, "beam_width": 4}, "leave one out"),
        ({"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens >= 1 with beam search"),
        ({"early_stopping": "always"}, 'true, false or "never"'),
        ({"use_beam_search": False, "beam_width": 3}, "is an option of beam search"),
        ({"use_beam_search": False, "early_stopping": True}, "is an option of beam search"),
        ({"use_beam_search": False, "best_of": 1}, "best_of=1 is less than n=2"),
    ],
)
def test_incompatible_options_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        beams(**options)


def test_options_of_beams_with_one_that_is_greedy(llama):
    class Warm:
        temperature, top_k, top_p, min_p, repetition_penalty = 0.7, 50, 0.9, 0.1, 1.1

    resolved = beams().resolve(Warm())

    assert [beams(**o).num_sequences for o in ({}, {"best_of": 5}, {"beam_width": 4})] == [2, 5, 4]
    assert resolved.greedy
    assert (resolved.top_k, resolved.top_p, resolved.min_p) == (0, 1.0, 0.0)
    assert resolved.repetition_penalty == 1.1

    greedy, one = (run_one(engine_of(llama), p) for p in (engines.greedy(6), beams(n=1)))
    assert one.token_ids == greedy.token_ids

    output = run_one(engine_of(llama), beams(n=3, logprobs=2, length_penalty=0.5))

    for choice in output.choices:
        total = sum(token.logprob for token in choice.logprobs)
        assert choice.score == pytest.approx(total / 6**0.5, abs=1e-4)
        assert [token.token_id for token in choice.logprobs] == list(choice.token_ids)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs)


def test_a_search_prefills_its_prompt_once_and_masks_every_beam(llama):
    engine = engine_of(llama, enable_prefix_caching=False)

    output = run_one(engine, beams(n=2, beam_width=4, prompt_logprobs=0))

    assert engine.num_processed_tokens == len(PROMPT) + 4 * 5
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.usage.completion_tokens == 2 * 6  # of the returned sequences

    # with 2 allowed tokens, the first step has 2 beams and the second 4
    three = run_one(engine_of(llama), beams(n=4, allowed_token_ids=[30, 31, 32]))
    two = run_one(engine_of(llama), beams(n=4, allowed_token_ids=[30, 31], max_tokens=2))
    assert {token for choice in three.choices for token in choice.token_ids} <= {30, 31, 32}
    assert len({choice.token_ids for choice in three.choices}) == 4
    assert {c.token_ids for c in two.choices} == {(i, j) for i in (30, 31) for j in (30, 31)}


@pytest.mark.parametrize(
    ("undecodable", "options"),
    [
        (range(zoo.VOCAB_SIZE - 90, zoo.VOCAB_SIZE), {}),
        (range(40), {}),
        (range(40), {"logit_bias": {33: 20.0}}),
    ],
)
def test_undecodable_tokens_are_in_no_beam(llama, undecodable, options):
    engine = engine_of(llama)
    sampler = engine.sampling_step.sampler
    engine.sampling_step.sampler = Sampler(sampler.vocab_size, (), undecodable_ids=undecodable)

    output = run_one(engine, beams(n=3, logprobs=2, **options))

    found = {token for choice in output.choices for token in choice.token_ids}
    assert found & set(undecodable) == options.get("logit_bias", {}).keys()
    listed = {i for c in output.choices for t in c.logprobs for i, _ in t.top_logprobs}
    assert not listed & set(undecodable)


def test_errors_and_evictions_apply_to_every_beam(llama):
    engine = engine_of(llama)

    def broken(_module, _inputs, logits):
        return torch.full_like(logits, torch.nan) if engine.num_steps == 2 else None

    with llama.decoder.model.lm_head.register_forward_hook(broken):
        output = run_one(engine, beams(n=2, beam_width=3))

    assert "NaN" in output.error
    assert [choice.finish_reason for choice in output.choices] == ["error"] * 2

    # prefill of a beam's tokens under the same rule gives each token the same score
    policy = "recent:cap=12,every=4"
    engine = engine_of(llama, longest=12, evict=policy)
    for choice in run_one(engine, beams(n=3, max_tokens=12, logprobs=0)).choices:
        token_ids = [*PROMPT, *choice.token_ids]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        scored = run_one(engine_of(llama, evict=policy), params, prompt=token_ids)
        expected = [token.logprob for token in scored.prompt_logprobs[len(PROMPT) :]]
        assert [token.logprob for token in choice.logprobs] == pytest.approx(expected, abs=1e-4)
