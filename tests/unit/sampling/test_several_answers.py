"""Several answers to one prompt: read once, forked, drawn apart, given up and resumed as one."""

import random

import numpy as np
import pytest

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


def engine_of(model, *, room=8.0, longest=40, **kv) -> Engine:
    return engines.engine_for(model, room=room, longest=longest, page_tokens=PAGE_TOKENS, **kv)


def drawn(**options) -> SamplingParams:
    said = {"max_tokens": 10, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return SamplingParams(**said | options)


def answer(engine, params, prompt=PROMPT, **submit):
    return answers(engine, [(prompt, params)], **submit)[0]


def answers(engine, requested, on_step=lambda: None, **submit):
    builders, done = {}, {}
    for prompt, params in requested:
        request_id = engine.submit(GenerationRequest(prompt, params, **submit))
        builders[request_id] = OutputBuilder(request_id, tuple(prompt))
    while engine.has_work:
        for delta in engine.step():
            whole = builders[delta.request_id].add(delta)
            if whole is not None:
                done[delta.request_id] = whole
        on_step()
    engine.check()
    return [done[request_id] for request_id in builders]


def alone(model, seed, **options):
    return answer(engine_of(model), drawn(seed=seed, **options))


class CountedCopies:
    """Passes on what a memory asks of its bytes, and counts the pages copied."""

    def __init__(self, store) -> None:
        self._store, self.num_pages = store, 0

    def copy_pages(self, page_class, source, target):
        self.num_pages += len(source)
        self._store.copy_pages(page_class, source, target)

    def __getattr__(self, name):
        return getattr(self._store, name)


# ---- what comes out ----------------------------------------------------------------------------


def test_n_answers_are_n_runs_with_the_seeds_that_follow(model):
    together = answer(engine_of(model), drawn(n=4))
    apart = [alone(model, seed) for seed in range(5, 9)]

    assert [choice.token_ids for choice in together.choices] == [a.token_ids for a in apart]
    assert len({choice.token_ids for choice in together.choices}) > 1
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.token_ids == together.choices[0].token_ids
    assert {choice.finish_reason for choice in together.choices} == {"length"}


def test_greedy_answers_are_all_the_same(llama):
    together = answer(engine_of(llama), drawn(n=3, temperature=0.0))

    assert len({choice.token_ids for choice in together.choices}) == 1


def test_the_prompt_is_read_once_and_counted_once(llama):
    engine = engine_of(llama, enable_prefix_caching=False)

    usage = answer(engine, drawn(n=4)).usage

    assert engine.num_processed_tokens == len(PROMPT) + 4 * 9  # the last token is never processed
    assert engine.num_generated_tokens == 40
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 40)


def test_deltas_say_whose_they_are_and_the_last_of_all_has_the_usage(llama):
    engine = engine_of(llama)
    request_id = engine.submit(GenerationRequest(PROMPT, drawn(n=2, max_tokens=3)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()

    assert {delta.request_id for delta in deltas} == {request_id}
    assert [delta.index for delta in deltas] == [0, 1] * 3
    assert [delta.is_last for delta in deltas] == [False] * 5 + [True]
    assert [delta.finish_reason for delta in deltas[-2:]] == ["length"] * 2


def test_best_of_returns_the_likeliest_best_first(llama):
    best = answer(engine_of(llama), drawn(n=2, best_of=5))
    every = [alone(llama, seed, logprobs=0) for seed in range(5, 10)]
    ranked = sorted(every, key=lambda a: -sum(token.logprob for token in a.logprobs))

    assert [choice.token_ids for choice in best.choices] == [a.token_ids for a in ranked[:2]]
    assert [choice.score for choice in best.choices] == pytest.approx(
        [a.score for a in ranked[:2]], abs=TOLERANCE
    )
    assert best.choices[0].score > best.choices[1].score
    assert best.logprobs is None  # nobody asked for them
    assert best.usage.completion_tokens == 50  # those that are dropped have been generated too


def test_nothing_of_ranked_answers_comes_before_all_have_ended(llama):
    engine = engine_of(llama)
    engine.submit(GenerationRequest(PROMPT, drawn(n=1, best_of=2, logprobs=1, max_tokens=4)))
    steps = []
    while engine.has_work:
        steps.append(engine.step())

    assert [len(deltas) for deltas in steps] == [0] * (len(steps) - 1) + [1]
    assert len(steps[-1][0].logprobs) == 4


def test_a_prompt_is_scored_once_for_all_answers(llama):
    together = answer(engine_of(llama), drawn(n=3, prompt_logprobs=1))
    single = answer(engine_of(llama), drawn(prompt_logprobs=1))

    assert len(together.prompt_logprobs) == len(PROMPT)
    for ours, theirs in zip(together.prompt_logprobs[1:], single.prompt_logprobs[1:], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=TOLERANCE)


def test_scores_of_a_prompt_do_not_depend_on_which_answer_is_best(llama):
    """Of four answers one is returned, and the first one drawn is not always that one."""
    single = answer(engine_of(llama), drawn(prompt_logprobs=0))
    for seed in range(5, 10):
        best = answer(engine_of(llama), drawn(best_of=4, prompt_logprobs=0, seed=seed))

        assert [score and score.token_id for score in best.prompt_logprobs] == [
            score and score.token_id for score in single.prompt_logprobs
        ]


def test_several_answers_without_tokens_are_several_ends(llama):
    scored = answer(engine_of(llama), SamplingParams(n=3, max_tokens=0, prompt_logprobs=0))

    assert [choice.finish_reason for choice in scored.choices] == ["length"] * 3
    assert len(scored.prompt_logprobs) == len(PROMPT)


def test_each_answer_ends_by_itself(llama):
    free = [alone(llama, seed).token_ids for seed in range(5, 9)]
    stop = free[1][3]

    together = answer(engine_of(llama), drawn(n=4, stop_token_ids=[stop]))

    for choice, tokens in zip(together.choices, free, strict=True):
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert choice.token_ids == tokens[:cut]
        assert choice.finish_reason == ("stop" if stop in tokens else "length")


# ---- pages -------------------------------------------------------------------------------------


def test_only_the_written_page_is_copied(llama):
    """21 prompt tokens fill 5 pages of 4 and a quarter of a sixth in each of the 2 layers. The
    four sequences then write into the sixth: three copy it, the last to write keeps it. Up to
    30 tokens each comes to have 8 pages, of which it shares 5: 5 + 4 * 3 = 17 in each layer.
    """
    engine = engine_of(llama, enable_prefix_caching=False)
    memory = engine.pool.kv.memory
    copies = memory.store = CountedCopies(memory.store)
    page_bytes = memory.layout.page_classes[0].page_bytes

    usage = answer(engine, drawn(n=4)).usage

    assert copies.num_pages == 3 * 2
    assert memory.arena_peak_bytes == 17 * 2 * page_bytes
    assert usage.kv_peak_bytes == 17 * 2 * page_bytes


def test_a_prompt_of_whole_pages_is_not_copied_at_all(llama):
    engine = engine_of(llama, enable_prefix_caching=False)
    copies = engine.pool.kv.memory.store = CountedCopies(engine.pool.kv.memory.store)

    answer(engine, drawn(n=4), prompt=PROMPT[:20])

    assert copies.num_pages == 0


# ---- ends from outside -------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("after_steps", [0, 1, 4])
def test_one_of_several_can_be_cancelled(llama, index, after_steps):
    engine = engine_of(llama, chunk_tokens=8)
    builder = OutputBuilder(
        engine.submit(GenerationRequest(PROMPT, drawn(n=3), request_id="r")), tuple(PROMPT)
    )
    deltas = [delta for _ in range(after_steps) for delta in engine.step()]
    engine.cancel("r", index)
    while engine.has_work:
        deltas += engine.step()
    [whole] = [whole for delta in deltas if (whole := builder.add(delta)) is not None]

    engine.check()
    for choice in whole.choices:
        expected = alone(llama, 5 + choice.index).token_ids
        if choice.index == index:
            assert choice.finish_reason == "abort"
            assert choice.token_ids == expected[: len(choice.token_ids)]
        else:
            assert choice.token_ids == expected


@pytest.mark.parametrize("after_steps", [0, 1, 4])
@pytest.mark.parametrize("best_of", [None, 3])
def test_all_of_them_can_be_cancelled(llama, after_steps, best_of):
    engine = engine_of(llama, chunk_tokens=8)
    builder = OutputBuilder(
        engine.submit(GenerationRequest(PROMPT, drawn(n=3, best_of=best_of), request_id="r")),
        tuple(PROMPT),
    )
    deltas = [delta for _ in range(after_steps) for delta in engine.step()]
    engine.cancel("r")
    while engine.has_work:
        deltas += engine.step()

    [whole] = [whole for delta in deltas if (whole := builder.add(delta)) is not None]
    assert [choice.finish_reason for choice in whole.choices] == ["abort"] * 3
    engine.check()


def test_an_id_in_use_is_refused_and_free_again_when_all_answers_have_ended(llama):
    engine = engine_of(llama)
    engine.submit(GenerationRequest(PROMPT, drawn(n=2), request_id="r"))
    with pytest.raises(RequestError, match="request id 'r' is in use"):
        engine.submit(GenerationRequest(PROMPT, drawn(), request_id="r"))

    while engine.has_work:
        engine.step()

    assert engine.submit(GenerationRequest(PROMPT, drawn(), request_id="r")) == "r"


def test_one_can_be_cancelled_while_the_group_waits_to_be_copied_again(llama):
    engine = engine_of(llama, chunk_tokens=4, enable_prefix_caching=False)
    builder = OutputBuilder(
        engine.submit(GenerationRequest(PROMPT, drawn(n=3), request_id="r")), tuple(PROMPT)
    )
    deltas = [delta for _ in range(9) for delta in engine.step()]
    engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "forced")
    deltas += engine.step()  # one reads again, the others wait for it
    engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "forced")
    engine.cancel("r", 1)
    while engine.has_work:
        deltas += engine.step()

    [whole] = [whole for delta in deltas if (whole := builder.add(delta)) is not None]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "abort", "length"]
    assert whole.choices[2].token_ids == alone(llama, 7).token_ids
    engine.check()


# ---- under pressure ----------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_groups_that_are_thrown_out_come_back_with_the_same_answers(model, prefix_cache):
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randint(3, 24))] for _ in range(6)]
    options = [drawn(n=rng.randint(1, 4), seed=seed, max_tokens=16) for seed in range(6)]
    engine = engine_of(model, room=3.6, longest=40, enable_prefix_caching=prefix_cache)

    results = answers(engine, list(zip(prompts, options, strict=True)))

    assert engine.scheduler.num_preemptions > 3
    for prompt, params, result in zip(prompts, options, results, strict=True):
        for choice in result.choices:
            seed = params.seed + choice.index
            expected = answer(engine_of(model), drawn(seed=seed, max_tokens=16), prompt=prompt)
            assert choice.token_ids == expected.token_ids
    assert any(result.usage.preemptions for result in results)


def test_what_is_shared_is_shared_again_after_a_preemption(llama):
    engine = engine_of(llama, enable_prefix_caching=False)
    engine.submit(GenerationRequest(PROMPT, drawn(n=4), request_id="r"))
    for _ in range(6):
        engine.step()
    memory, processed = engine.pool.kv.memory, engine.num_processed_tokens
    before = memory.used_bytes
    known = [r.num_tokens for r in engine.scheduler.running]
    engine.scheduler.lifecycle.preempt(engine.scheduler.running[2], "forced")
    assert len(memory.live_rows) == 0

    engine.step()  # the first reads all it knows, up to where the others part
    while len(engine.scheduler.running) < 4 or any(
        r.num_uncomputed > 1 for r in engine.scheduler.running
    ):
        engine.step()

    assert memory.used_bytes <= before + 4 * memory.layout.smallest_sequence_bytes
    assert engine.num_processed_tokens - processed < sum(known) - 2 * len(PROMPT)
    while engine.has_work:
        engine.step()
    engine.check()


@pytest.mark.parametrize("room", [4.0, 8.0])
def test_sequences_that_share_evict_apart(llama, room):
    policy = "recent:cap=16,every=4"
    engine = engine_of(llama, room=room, longest=16, evict=policy)
    together = answer(engine, drawn(n=4, max_tokens=20))

    for choice in together.choices:
        single = answer(engine_of(llama, evict=policy), drawn(seed=5 + choice.index, max_tokens=20))
        assert choice.token_ids == single.token_ids


def test_evicting_groups_come_back_with_the_same_answers(llama):
    policy = "recent:cap=12,every=4"
    requested = [(PROMPT[: 5 + 3 * i], drawn(n=3, seed=i, max_tokens=14)) for i in range(4)]
    engine = engine_of(llama, room=5.0, longest=12, evict=policy)

    results = answers(engine, requested)

    assert engine.scheduler.num_preemptions > 0
    for (prompt, params), result in zip(requested, results, strict=True):
        for choice in result.choices:
            own = drawn(seed=params.seed + choice.index, max_tokens=14)
            expected = answer(engine_of(llama, evict=policy), own, prompt=prompt)
            assert choice.token_ids == expected.token_ids


# ---- too many at once --------------------------------------------------------------------------


def test_a_group_runs_whole_up_to_the_bound_of_its_pages_and_apart_beyond(llama):
    """30 tokens take 8 pages in each of 2 layers, of which the sequences share 5: n of them need
    (5 + 3 n) * 2 pages. Room for three sequences of 30 tokens without sharing is 48 pages.
    """
    engine = engine_of(llama, room=3.0, longest=30)
    memory = engine.pool.kv.memory
    pages = memory.total_bytes // memory.layout.page_classes[0].page_bytes
    most = (pages // 2 - 5) // 3

    for n, whole in ((most, True), (most + 1, False)):
        engine.submit(GenerationRequest(PROMPT, drawn(n=n), request_id="r"))
        assert engine.scheduler.num_waiting == (1 if whole else n)
        engine.cancel("r")
        engine.step()
        assert len(answer(engine, drawn(n=n)).choices) == n


@pytest.mark.parametrize("limit", [{"max_num_seqs": 3}, {"room": 1.2}])
def test_answers_that_cannot_run_together_are_the_same(llama, limit):
    together = answer(engine_of(llama, **limit), drawn(n=5))

    expected = [alone(llama, seed).token_ids for seed in range(5, 10)]
    assert [choice.token_ids for choice in together.choices] == expected


@pytest.mark.parametrize("limits", [{"max_num_seqs": 1}, {"room": 1.2}, {"max_num_seqs": 3}])
def test_answers_that_take_turns_count_the_bytes_of_those_that_ran_at_once(llama, limits):
    """Room for 1.2 of them, or for one, is what five can hold at any time."""
    engine = engine_of(llama, **limits)
    page_bytes = engine.pool.kv.memory.layout.page_classes[0].page_bytes
    usage = answer(engine, drawn(n=5)).usage
    one = answer(engine_of(llama), drawn(n=1)).usage.kv_peak_bytes

    assert one <= usage.kv_peak_bytes <= engine.pool.kv.memory.total_bytes
    if limits == {"max_num_seqs": 1}:
        assert usage.kv_peak_bytes == one
    if limits == {"max_num_seqs": 3}:
        assert one + 2 * 2 * page_bytes <= usage.kv_peak_bytes <= 3 * one


def test_answers_that_share_no_page_count_what_each_of_them_held(llama):
    engine = engine_of(llama, store="contiguous_growing", enable_prefix_caching=False)

    held = [answer(engine, drawn(n=n)).usage.kv_peak_bytes for n in (1, 3)]

    assert held[1] == 3 * held[0]


def test_what_does_not_fit_even_apart_is_refused_whole(llama):
    engine = engine_of(llama, room=1.0, longest=30)

    with pytest.raises(NeverFits):
        engine.submit(GenerationRequest(PROMPT, drawn(n=3, max_tokens=100)))
    assert not engine.has_work
    assert len(answer(engine, drawn(n=3, max_tokens=8)).choices) == 3


def test_draws_of_all_answers_differ_without_a_seed(llama):
    result = answer(engine_of(llama), drawn(n=4, seed=None))

    assert len({choice.token_ids for choice in result.choices}) > 1
    assert np.all([len(choice.token_ids) == 10 for choice in result.choices])
