"""Several choices of one prompt: one prefill, forked pages, preempted and resumed as a group."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, RequestError
from quire.sampling.outputs import OutputBuilder
from support import engines

PROMPT = list(range(5, 26))  # 21 tokens
PAGE_TOKENS = 4
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["llama", "qwen2_window"])
def model(request):
    return engines.load(request.param)


@pytest.fixture(scope="module")
def llama():
    return engines.load("llama")


def engine_of(model, *, num_sequences=8.0, longest=40, **kv) -> Engine:
    return engines.engine_for(
        model, room=num_sequences, longest=longest, page_tokens=PAGE_TOKENS, **kv
    )


def drawn(**options) -> SamplingParams:
    defaults = {"max_tokens": 10, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def run_one(engine, params, prompt=PROMPT, **submit):
    return run_all(engine, [(prompt, params)], **submit)[0]


def run_all(engine, batch, on_step=lambda: None, **submit):
    builders, done = {}, {}
    for prompt, params in batch:
        request_id = engine.submit(GenerationRequest(prompt, params, **submit))
        builders[request_id] = OutputBuilder(request_id, tuple(prompt))
    while engine.has_work:
        for delta in engine.step():
            output = builders[delta.request_id].add(delta)
            if output is not None:
                done[delta.request_id] = output
        on_step()
    engine.check()
    return [done[request_id] for request_id in builders]


def run_single(model, seed, **options):
    return run_one(engine_of(model), drawn(seed=seed, **options))


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


class CountedCopies:
    """Delegates to a store, and counts copied pages."""

    def __init__(self, store) -> None:
        self._store, self.num_pages = store, 0

    def copy_pages(self, page_class, source, target):
        self.num_pages += len(source)
        self._store.copy_pages(page_class, source, target)

    def __getattr__(self, name):
        return getattr(self._store, name)


# ---- outputs -----------------------------------------------------------------------------------


def test_n_choices_equal_n_runs_with_consecutive_seeds(model):
    together = run_one(engine_of(model), drawn(n=4))
    singles = [run_single(model, seed) for seed in range(5, 9)]

    assert [choice.token_ids for choice in together.choices] == [o.token_ids for o in singles]
    assert len({choice.token_ids for choice in together.choices}) > 1
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.token_ids == together.choices[0].token_ids
    assert {choice.finish_reason for choice in together.choices} == {"length"}


def test_prompt_is_prefilled_and_counted_once(llama):
    engine = engine_of(llama, enable_prefix_caching=False)

    usage = run_one(engine, drawn(n=4)).usage

    assert engine.num_processed_tokens == len(PROMPT) + 4 * 9  # the last token is never processed
    assert engine.num_generated_tokens == 40
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 40)


def test_deltas_have_a_choice_index_and_the_last_is_marked(llama):
    engine = engine_of(llama)
    request_id = engine.submit(GenerationRequest(PROMPT, drawn(n=2, max_tokens=3)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()

    assert {delta.request_id for delta in deltas} == {request_id}
    assert [delta.index for delta in deltas] == [0, 1] * 3
    assert [delta.is_last for delta in deltas] == [False] * 5 + [True]
    assert [delta.finish_reason for delta in deltas[-2:]] == ["length"] * 2


def test_best_of_returns_the_max_likely_choices_in_order(llama):
    best = run_one(engine_of(llama), drawn(n=2, best_of=5))
    candidates = [run_single(llama, seed, logprobs=0) for seed in range(5, 10)]
    ranked = sorted(candidates, key=lambda o: -sum(token.logprob for token in o.logprobs))

    assert [choice.token_ids for choice in best.choices] == [o.token_ids for o in ranked[:2]]
    assert [choice.score for choice in best.choices] == pytest.approx(
        [o.score for o in ranked[:2]], abs=TOLERANCE
    )
    assert best.choices[0].score > best.choices[1].score
    assert best.logprobs is None  # not requested
    assert best.usage.completion_tokens == 50  # includes dropped choices


def test_ranked_choices_are_emitted_after_all_have_ended(llama):
    engine = engine_of(llama)
    engine.submit(GenerationRequest(PROMPT, drawn(n=1, best_of=2, logprobs=1, max_tokens=4)))
    steps = []
    while engine.has_work:
        steps.append(engine.step())

    assert [len(deltas) for deltas in steps] == [0] * (len(steps) - 1) + [1]
    assert len(steps[-1][0].logprobs) == 4


def test_prompt_is_scored_once_for_all_choices(llama):
    together = run_one(engine_of(llama), drawn(n=3, prompt_logprobs=1))
    single = run_one(engine_of(llama), drawn(prompt_logprobs=1))

    assert len(together.prompt_logprobs) == len(PROMPT)
    for actual, expected in zip(
        together.prompt_logprobs[1:], single.prompt_logprobs[1:], strict=True
    ):
        assert actual.logprob == pytest.approx(expected.logprob, abs=TOLERANCE)


def test_prompt_scores_are_independent_of_the_best_choice(llama):
    """One of four choices is returned, which is not always the first."""
    single = run_one(engine_of(llama), drawn(prompt_logprobs=0))
    for seed in range(5, 10):
        best = run_one(engine_of(llama), drawn(best_of=4, prompt_logprobs=0, seed=seed))

        assert [score and score.token_id for score in best.prompt_logprobs] == [
            score and score.token_id for score in single.prompt_logprobs
        ]


def test_several_choices_without_tokens_finish_separately(llama):
    scored = run_one(engine_of(llama), SamplingParams(n=3, max_tokens=0, prompt_logprobs=0))

    assert [choice.finish_reason for choice in scored.choices] == ["length"] * 3
    assert len(scored.prompt_logprobs) == len(PROMPT)


def test_each_choice_ends_independently(llama):
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
    copies = memory.store = CountedCopies(memory.store)
    page_bytes = memory.layout.page_classes[0].page_bytes

    usage = run_one(engine, drawn(n=4)).usage

    assert copies.num_pages == 3 * 2
    assert memory.arena_peak_bytes == 17 * 2 * page_bytes
    assert usage.kv_peak_bytes == 17 * 2 * page_bytes


# ---- cancelling --------------------------------------------------------------------------------


def cancelled(engine, params, after_steps, *index, before=tuple):
    """The output of a request that is cancelled, or one of its choices, after some steps."""
    builder = OutputBuilder(
        engine.submit(GenerationRequest(PROMPT, params, request_id="r")), tuple(PROMPT)
    )
    deltas = [delta for _ in range(after_steps) for delta in engine.step()]
    deltas += before()
    engine.cancel("r", *index)
    while engine.has_work:
        deltas += engine.step()
    engine.check()
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


@pytest.mark.parametrize("after_steps", [0, 1, 4])
@pytest.mark.parametrize("best_of", [None, 3])
def test_all_choices_can_be_cancelled(llama, after_steps, best_of):
    params = drawn(n=3, best_of=best_of)

    output = cancelled(engine_of(llama, chunk_tokens=8), params, after_steps)

    assert [choice.finish_reason for choice in output.choices] == ["abort"] * 3


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
    memory = engine.pool.kv.memory
    pages = memory.total_bytes // memory.layout.page_classes[0].page_bytes
    largest = (pages // 2 - 5) // 3

    for n, fits in ((largest, True), (largest + 1, False)):
        engine.submit(GenerationRequest(PROMPT, drawn(n=n), request_id="r"))
        assert engine.scheduler.num_waiting == (1 if fits else n)
        engine.cancel("r")
        engine.step()
        assert len(run_one(engine, drawn(n=n)).choices) == n


@pytest.mark.parametrize("limit", [{"max_num_seqs": 3}, {"num_sequences": 1.2}])
def test_choices_that_cannot_run_together_are_equal(llama, limit):
    together = run_one(engine_of(llama, **limit), drawn(n=5))

    expected = [run_single(llama, seed).token_ids for seed in range(5, 10)]
    assert [choice.token_ids for choice in together.choices] == expected


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 1}, {"num_sequences": 1.2}, {"max_num_seqs": 3}]
)
def test_kv_peak_of_sequential_choices_counts_concurrent_ones_only(llama, limits):
    """At any time five choices hold at most the memory of 1.2 sequences, or of one."""
    engine = engine_of(llama, **limits)
    page_bytes = engine.pool.kv.memory.layout.page_classes[0].page_bytes
    usage = run_one(engine, drawn(n=5)).usage
    single_bytes = run_one(engine_of(llama), drawn(n=1)).usage.kv_peak_bytes

    assert single_bytes <= usage.kv_peak_bytes <= engine.pool.kv.memory.total_bytes
    if limits == {"max_num_seqs": 1}:
        assert usage.kv_peak_bytes == single_bytes
    if limits == {"max_num_seqs": 3}:
        assert single_bytes + 2 * 2 * page_bytes <= usage.kv_peak_bytes <= 3 * single_bytes


def test_request_that_never_fits_is_refused_completely(llama):
    engine = engine_of(llama, num_sequences=1.0, longest=30)

    with pytest.raises(NeverFits):
        engine.submit(GenerationRequest(PROMPT, drawn(n=3, max_tokens=100)))
    assert not engine.has_work
    assert len(run_one(engine, drawn(n=3, max_tokens=8)).choices) == 3


def test_choices_differ_without_a_seed(llama):
    result = run_one(engine_of(llama), drawn(n=4, seed=None))

    assert len({choice.token_ids for choice in result.choices}) > 1
    assert np.all([len(choice.token_ids) == 10 for choice in result.choices])
