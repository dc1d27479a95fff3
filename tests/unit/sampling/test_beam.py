"""The state machine of beam search, and beam search in an engine with little memory."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits, RequestError
from quire.sampling.beam import BeamSearch, Candidate
from quire.sampling.outputs import OutputBuilder
from quire.sampling.sampler import Sampler
from support import engines, zoo

END = 9
PROMPT = list(range(20, 41))  # 21 tokens
PAGE_TOKENS = 4


def beams(**options) -> SamplingParams:
    defaults = {"n": 2, "use_beam_search": True, "max_tokens": 6, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def search_of(**options) -> BeamSearch:
    return BeamSearch(beams(stop_token_ids=[END], **options), ())


def tokens(path) -> list[int]:
    return [candidate.token_id for candidate in path]


# ---- the state machine -------------------------------------------------------------------------


def test_best_open_and_best_ended_beams_are_retained():
    search = search_of()
    candidates = [Candidate(-1.0, 0, END), Candidate(-2.0, 0, 3), Candidate(-2.5, 0, 4)]

    assert search.advance(candidates) == [0, 0]

    assert [tokens(beam) for beam in search.beams] == [[3], [4]]
    assert [(h.score, tokens(h.path)) for h in search.ended] == [(-1.0, [END])]
    assert not search.is_done


def test_ended_candidate_beyond_the_beam_width_is_ignored():
    search = search_of()

    search.advance([Candidate(-1.0, 0, 3), Candidate(-2.0, 0, 4), Candidate(-3.0, 0, END)])

    assert search.ended == []


def test_scores_are_divided_by_length_to_the_length_penalty():
    search = search_of(length_penalty=2.0)
    search.advance([Candidate(-1.0, 0, 3), Candidate(-2.0, 0, 4)])

    search.advance([Candidate(-6.0, 1, END), Candidate(-7.0, 0, 5), Candidate(-8.0, 1, 5)])

    assert search.ended[0].score == -6.0 / 2**2
    assert tokens(search.ended[0].path) == [4, END]
    assert [tokens(beam) for beam in search.beams] == [[3, 5], [4, 5]]


@pytest.mark.parametrize(
    ("early_stopping", "done"), [(True, True), (False, False), ("never", False)]
)
def test_full_list_of_ended_beams_ends_the_search_with_early_stopping(early_stopping, done):
    """-4.1 over 2 tokens is still better than the worst ended beam, -5 over 1."""
    search = search_of(early_stopping=early_stopping)
    search.advance([Candidate(-1.0, 0, END), Candidate(-2.0, 0, 3), Candidate(-2.1, 0, 4)])

    search.advance([Candidate(-9.9, 0, END), Candidate(-8.1, 0, 5), Candidate(-8.2, 1, 5)])

    assert len(search.ended) == 2
    assert search.is_done == done


@pytest.mark.parametrize(("early_stopping", "done"), [(False, True), ("never", False)])
def test_early_stopping_never_scores_open_beams_at_max_tokens(early_stopping, done):
    """Ended: -1 and -2 / 2 = -1. Open: -6; over its 2 tokens -3, over all 10 it could be -0.6."""
    search = search_of(early_stopping=early_stopping, max_tokens=10)
    search.advance([Candidate(-1.0, 0, END), Candidate(-1.5, 0, 3), Candidate(-1.6, 0, 4)])

    search.advance([Candidate(-2.0, 0, END), Candidate(-6.0, 0, 5), Candidate(-6.1, 1, 5)])

    assert search.is_done == done


def test_all_beams_end_at_max_tokens():
    search = search_of(max_tokens=1)

    assert search.advance([Candidate(-1.0, 0, 3), Candidate(-2.0, 0, 4)]) == []
    assert search.is_done
    assert [tokens(h.path) for h in search.ended] == [[3], [4]]


def test_fewer_candidates_give_fewer_beams():
    search = search_of()

    assert search.advance([Candidate(-1.0, 0, 3)]) == [0]
    assert search.scores == [-1.0]


# ---- options -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("options", "width"), [({}, 2), ({"best_of": 5}, 5), ({"beam_width": 4}, 4)]
)
def test_number_of_beams_follows_the_options(options, width):
    assert beams(**options).num_sequences == width


def test_model_sampling_defaults_do_not_apply_to_beam_search():
    class Warm:
        temperature, top_k, top_p, min_p, repetition_penalty = 0.7, 50, 0.9, 0.1, 1.1

    resolved = beams().resolve(Warm())

    assert resolved.greedy
    assert (resolved.top_k, resolved.top_p, resolved.min_p) == (0, 1.0, 0.0)
    assert resolved.repetition_penalty == 1.1


# ---- in an engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def engine_of(model, *, num_sequences=8.0, longest=40, **kv):
    return engines.engine_for(
        model, room=num_sequences, longest=longest, page_tokens=PAGE_TOKENS, **kv
    )


def search(engine, params, prompt=PROMPT):
    builder = OutputBuilder(
        engine.submit(GenerationRequest(prompt, params, request_id="r")), tuple(prompt)
    )
    outputs = []
    while engine.has_work:
        outputs += [o for delta in engine.step() if (o := builder.add(delta)) is not None]
    engine.check()
    [output] = outputs
    return output


def test_one_beam_equals_greedy_decoding(model):
    greedy = search(engine_of(model), engines.greedy(6))

    assert search(engine_of(model), beams(n=1)).token_ids == greedy.token_ids


def test_no_output_before_the_search_has_ended(model):
    engine = engine_of(model)
    engine.submit(GenerationRequest(PROMPT, beams(n=2, beam_width=3)))
    steps = []
    while engine.has_work:
        steps.append(engine.step())

    assert [len(deltas) for deltas in steps] == [0] * 5 + [2]
    assert [delta.index for delta in steps[-1]] == [0, 1]
    assert [delta.is_last for delta in steps[-1]] == [False, True]


def test_logprobs_of_a_beam_sum_to_its_score(model):
    output = search(engine_of(model), beams(n=3, logprobs=2, length_penalty=0.5))

    for choice in output.choices:
        total = sum(token.logprob for token in choice.logprobs)
        assert choice.score == pytest.approx(total / 6**0.5, abs=1e-4)
        assert [token.token_id for token in choice.logprobs] == list(choice.token_ids)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs)


def test_prompt_of_a_search_is_prefilled_and_scored_once(model):
    engine = engine_of(model, enable_prefix_caching=False)

    output = search(engine, beams(n=2, beam_width=4, prompt_logprobs=0))

    assert engine.num_processed_tokens == len(PROMPT) + 4 * 5
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert output.usage.completion_tokens == 2 * 6  # of the returned sequences


def test_token_masks_apply_to_every_beam(model):
    allowed = [30, 31, 32]

    output = search(engine_of(model), beams(n=4, allowed_token_ids=allowed))

    assert {token for choice in output.choices for token in choice.token_ids} <= set(allowed)
    assert len({choice.token_ids for choice in output.choices}) == 4


@pytest.mark.parametrize(
    ("undecodable", "options"),
    [
        (range(zoo.VOCAB_SIZE - 90, zoo.VOCAB_SIZE), {}),
        (range(40), {}),
        (range(40), {"logit_bias": {33: 20.0}}),
    ],
)
def test_undecodable_tokens_are_in_no_beam(model, undecodable, options):
    engine = engine_of(model)
    sampler = engine.sampling_step.sampler
    engine.sampling_step.sampler = Sampler(sampler.vocab_size, (), undecodable_ids=undecodable)

    output = search(engine, beams(n=3, logprobs=2, **options))

    found = {token for choice in output.choices for token in choice.token_ids}
    assert found & set(undecodable) == options.get("logit_bias", {}).keys()
    listed = {i for c in output.choices for t in c.logprobs for i, _ in t.top_logprobs}
    assert not listed & set(undecodable)


def test_few_allowed_tokens_reduce_the_beams_of_the_first_steps(model):
    """With 2 allowed tokens, the first step has 2 beams and the second 4."""
    output = search(engine_of(model), beams(n=4, allowed_token_ids=[30, 31], max_tokens=2))

    assert sorted(choice.token_ids for choice in output.choices) == [
        (first, second) for first in (30, 31) for second in (30, 31)
    ]


@pytest.mark.parametrize("after_steps", [0, 1, 3])
def test_beam_search_can_be_cancelled(model, after_steps):
    engine = engine_of(model)
    engine.submit(GenerationRequest(PROMPT, beams(n=2, beam_width=4), request_id="r"))
    deltas = [delta for _ in range(after_steps) for delta in engine.step()]
    engine.cancel("r", 1)  # ranked beams are cancelled together
    deltas += engine.step()

    assert [delta.finish_reason for delta in deltas] == ["abort"] * 2
    assert not engine.has_work
    engine.check()


def test_non_finite_logits_end_the_search_with_an_error(model):
    engine = engine_of(model)

    def broken(_module, _inputs, logits):
        return torch.full_like(logits, torch.nan) if engine.num_steps == 2 else None

    with model.decoder.model.lm_head.register_forward_hook(broken):
        output = search(engine, beams(n=2, beam_width=3))

    assert "NaN" in output.error
    assert [choice.finish_reason for choice in output.choices] == ["error"] * 2


def test_eviction_applies_to_every_beam(model):
    """Prefill of a beam's tokens under the same rule gives each token the same score."""
    policy = "recent:cap=12,every=4"
    output = search(
        engine_of(model, num_sequences=8.0, longest=12, evict=policy),
        beams(n=3, max_tokens=12, logprobs=0),
    )

    for choice in output.choices:
        token_ids = [*PROMPT, *choice.token_ids]
        scored = search(
            engine_of(model, evict=policy),
            SamplingParams(max_tokens=0, prompt_logprobs=0),
            prompt=token_ids,
        )
        expected = scored.prompt_logprobs[len(PROMPT) :]
        assert [token.logprob for token in choice.logprobs] == pytest.approx(
            [token.logprob for token in expected], abs=1e-4
        )


def test_more_beams_than_fit_memory_are_refused(model):
    """26 tokens take 7 pages in each of 2 layers, of which 5 are shared: w beams need 5 + 2 w."""
    engine = engine_of(model, num_sequences=2.0, longest=26)
    memory = engine.pool.kv.memory
    pages = memory.total_bytes // memory.layout.page_classes[0].page_bytes
    most = (pages // 2 - 5) // 2

    with pytest.raises(NeverFits, match=f"in {most + 1} beams need .* use fewer beams"):
        engine.submit(GenerationRequest(PROMPT, beams(beam_width=most + 1)))
    assert len(search(engine, beams(beam_width=most)).choices) == 2
