from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError, RequestError
from quire.kernels.native.sampling import row_sampling
from quire.sampling import device_sampling
from quire.sampling.sampler import NO_TOKEN, Sampler, prompt_logprobs

VOCAB = 120
EOS = (1, 2)


@dataclass
class Row:
    params: SamplingParams
    prompt_token_ids: Sequence[int] = (5, 6, 7)
    output_token_ids: Sequence[int] = ()
    sampling_seed: int = 11
    matcher: None = None

    @property
    def num_output_tokens(self):
        return len(self.output_token_ids)


NATIVE = row_sampling()


@pytest.fixture(params=["torch", "native"])
def native(request):
    if request.param == "native" and NATIVE is None:
        pytest.skip("no C extension with vector instructions")
    return NATIVE if request.param == "native" else None


@pytest.fixture
def sampler(native):
    return Sampler(VOCAB, EOS, native=native)


def random_logits(num_rows, seed=3):
    return 2 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8, seed=4),
    SamplingParams(temperature=1.0, min_p=0.05, top_k=50, top_p=0.95),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, allowed_token_ids=(3, 4, 5)),
    SamplingParams(bad_token_ids=((8,), (6, 7, 9))),
    SamplingParams(temperature=1.0, logit_bias={3: 5.0, 4: -100.0}, logprobs=2),
    SamplingParams(min_tokens=8, stop_token_ids=(3,), logprobs=0),
]


def mixed_rows():
    return [
        Row(params, output_token_ids=[10 + index, 4, 4], sampling_seed=100 + index)
        for index, params in enumerate(MIXED)
    ]


@given(order=st.permutations(range(len(MIXED))), size=st.integers(1, len(MIXED)))
@settings(max_examples=30, deadline=None)
def test_token_of_a_row_is_independent_of_the_batch(order, size):
    sampler = Sampler(VOCAB, EOS, native=NATIVE)
    logits, rows = random_logits(len(MIXED)), mixed_rows()
    alone = [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    batch = order[:size]

    tokens = sampler.sample(logits[batch], [rows[i] for i in batch])

    assert [token.token_id for token in tokens] == [alone[i].token_id for i in batch]
    assert [token.top_logprobs for token in tokens] == [alone[i].top_logprobs for i in batch]


@pytest.mark.skipif(NATIVE is None, reason="no C extension with vector instructions")
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.01, 1.0, 5.0, 30.0]))
@settings(max_examples=30, deadline=None)
def test_native_sampling_equals_the_operations_of_torch(seed, scale):
    logits, rows = scale * random_logits(len(MIXED), seed), mixed_rows()
    ours, expected = (Sampler(VOCAB, EOS, native=n).sample(logits, rows) for n in (NATIVE, None))
    assert ours == expected


@pytest.mark.parametrize("rows_at_once", [1, 3, 20])
@pytest.mark.parametrize("greedy_rows", [0, 2])
def test_blocks_of_rows_give_equal_tokens(rows_at_once, greedy_rows, monkeypatch):
    rows = [*mixed_rows()[1:], *[Row(SamplingParams(temperature=0.0))] * greedy_rows]
    logits, sizes = random_logits(len(rows)), []
    expected = Sampler(VOCAB, EOS).sample(logits, rows)
    for module, name in ((device_sampling, "choose"), (device_sampling.sampling, "score")):

        def noted(call, logits, *args, **options):
            sizes.append(len(logits))
            return call(logits, *args, **options)

        monkeypatch.setattr(module, name, partial(noted, getattr(module, name)))
    block_bytes = rows_at_once * VOCAB * device_sampling.SCRATCH_BYTES_OF_TOKEN
    monkeypatch.setattr(device_sampling, "SCRATCH_BYTES", block_bytes)

    assert Sampler(VOCAB, EOS).sample(logits, rows) == expected
    assert max(sizes) == min(rows_at_once, len(MIXED) - 1)
    assert sum(sizes) == len(MIXED) - 1 + sum(row.params.logprobs is not None for row in rows)


def test_greedy_rows_equal_the_general_path_and_need_only_an_argmax(sampler, monkeypatch):
    assert device_sampling.block_rows(torch.empty(2, 1 << 26, device="meta")) == 1
    assert device_sampling.block_rows(torch.empty(256, 1 << 17, device="meta")) == 32

    logits = random_logits(64).to(torch.bfloat16)
    neutral = SamplingParams(temperature=0.0, logit_bias={7: 0.0})

    fast = sampler.sample(logits, [Row(SamplingParams(temperature=0.0))] * 64)
    slow = sampler.sample(logits, [Row(neutral)] * 64)

    assert fast == slow
    assert [token.token_id for token in fast] == logits.float().argmax(dim=-1).tolist()

    functions = ("sampler.edit", "device_sampling.edit", "device_sampling.narrow")
    for name in (*functions, "sampler.sampling.score"):
        monkeypatch.setattr(f"quire.sampling.{name}", pytest.fail)

    (token,) = sampler.sample(random_logits(1), [Row(SamplingParams(top_k=3, top_p=0.5))])

    assert token.token_id == random_logits(1).argmax()


def test_ties_select_the_smallest_id_and_padding_is_never_sampled(sampler):
    logits = torch.zeros(2, VOCAB)

    tokens = sampler.sample(logits, [Row(SamplingParams()), Row(SamplingParams(min_tokens=1))])

    assert [token.token_id for token in tokens] == [0, 0]

    padded = torch.cat([random_logits(1), torch.full((1, 8), 99.0)], dim=1)
    params = SamplingParams(repetition_penalty=1.2, logprobs=1)

    (token,) = sampler.sample(padded, [Row(params, prompt_token_ids=[VOCAB + 3])])

    assert token.token_id == random_logits(1).argmax()
    assert token == sampler.sample(random_logits(1), [Row(params, prompt_token_ids=[])])[0]


def test_draws_follow_the_distribution(sampler):
    num_draws = 8_000
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3:8] = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5])
    rows = [
        Row(SamplingParams(temperature=1.0), output_token_ids=[0] * (i % 40), sampling_seed=i // 40)
        for i in range(num_draws)
    ]

    tokens = sampler.sample(logits.expand(num_draws, -1), rows)

    counts = torch.tensor([token.token_id for token in tokens]).bincount(minlength=VOCAB)
    expected = num_draws * logits[0].softmax(dim=-1)
    live = expected > 0
    chi_square = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert counts[~live].sum() == 0
    assert chi_square < 18.47, "the 0.1% point of chi-square with 4 degrees of freedom"


def test_draws_differ_by_position_and_by_the_seed_of_the_request_or_else_of_the_engine(sampler):
    logits, numbers = torch.zeros(20, VOCAB), range(20)
    one, seeded, unseeded = (SamplingParams(temperature=1.0, seed=seed) for seed in (1, -5, None))
    drawn, again, at_seeds, by_engine = (
        {token.token_id for token in sampler.sample(logits, rows)}
        for rows in (
            *[[Row(one, output_token_ids=[0] * n) for n in numbers]] * 2,
            *([Row(params, sampling_seed=n) for n in numbers] for params in (seeded, unseeded)),
        )
    )

    assert len(drawn) > 10
    assert drawn == again
    assert (len(at_seeds), len(by_engine) > 10) == (1, True)


BAD = [(((9,),), {9}), (((6, 7, 9),), {9}), (((7, 9), (3,)), {3, 9}), (((5, 7, 9),), set())]
BAD += [(((1, 1, 1, 1, 5, 6, 7, 9),), set())]


def test_options_equal_those_of_transformers_and_only_repetition_counts_the_prompt(sampler):
    logits = random_logits(1)
    logits[0, 9], logits[0, 3] = 50, 40
    for bad_token_ids, banned in BAD:
        process = reference.NoBadWordsLogitsProcessor([list(ids) for ids in bad_token_ids])
        expected = process(torch.tensor([[5, 6, 7]]), logits)
        row = Row(SamplingParams(bad_token_ids=bad_token_ids), [5, 6], [7])
        (token,) = sampler.sample(logits, [row])

        assert set(expected[0].isinf().nonzero().flatten().tolist()) == banned
        assert token.token_id == expected.argmax()

    logits = random_logits(1)
    logits[0, [1, 2, 3]] = torch.tensor([50.0, 49.0, 48.0])
    params = SamplingParams(min_tokens=2, stop_token_ids=(3,))
    ignoring = SamplingParams(min_tokens=2, ignore_eos=True)
    for num_output in range(4):
        output = [7] * num_output
        (token,) = sampler.sample(logits, [Row(params, output_token_ids=output)])
        process = reference.MinNewTokensLengthLogitsProcessor(3, 2, [*EOS, 3])
        assert token.token_id == process(torch.tensor([[5, 6, 7, *output]]), logits).argmax()
    assert sampler.sample(logits, [Row(ignoring)])[0].token_id == 1

    logits = torch.zeros(2, VOCAB)
    logits[:, 5], logits[:, 6], logits[:, 8] = 3.0, 2.5, 2.0
    penalties = (SamplingParams(repetition_penalty=2.0), SamplingParams(presence_penalty=2.0))
    tokens = sampler.sample(logits, [Row(each, output_token_ids=[6]) for each in penalties])
    assert [token.token_id for token in tokens] == [8, 5]


UNDECODABLE = {"tail": (*range(112, VOCAB),), "holes": (9, 50, 51), "both": (9, 118, 119)}


@pytest.fixture(params=UNDECODABLE.values(), ids=UNDECODABLE)
def undecodable(request):
    return request.param


def test_undecodable_tokens_are_not_sampled(undecodable, native):
    likeliest, banned = random_logits(len(MIXED)), random_logits(len(MIXED))
    likeliest[:, list(undecodable)], banned[:, list(undecodable)] = 30.0, -torch.inf
    rows = [Row(replace(params, logprobs=None)) for params in MIXED]

    tokens = Sampler(VOCAB, EOS, undecodable_ids=undecodable, native=native).sample(likeliest, rows)

    assert tokens == Sampler(VOCAB, EOS, native=native).sample(banned, rows)


def test_end_token_without_a_text_is_sampled(native):
    logits = random_logits(1)
    logits[0, 119] = 30.0
    sampler = Sampler(VOCAB, (119,), undecodable_ids=(118, 119), native=native)

    (token,) = sampler.sample(logits, [Row(SamplingParams(temperature=0.0))])

    assert token.token_id == 119
    assert sampler.undecodable_ids == {118}


def test_undecodable_tokens_count_in_log_probabilities_and_are_not_listed(undecodable, native):
    sampler = Sampler(VOCAB, EOS, undecodable_ids=undecodable, native=native)
    logits = random_logits(1)
    logits[:, list(undecodable)] = 5.0
    log_probs = logits.log_softmax(dim=-1)[0]
    ranked = [i for i in log_probs.argsort(descending=True).tolist() if i not in undecodable]

    (token,) = sampler.sample(logits, [Row(SamplingParams(logprobs=3))])
    [scored] = prompt_logprobs(logits, [ranked[1]], 3, unlisted=sampler.unlisted(logits.device))

    assert (token.token_id, token.rank, scored.rank) == (ranked[0], 1, 2)
    assert token.top_logprobs == scored.top_logprobs
    assert [i for i, _ in token.top_logprobs] == ranked[:3]
    values = [value for _, value in token.top_logprobs]
    assert values == pytest.approx(log_probs[ranked[:3]].tolist())
    assert scored.logprob == pytest.approx(float(log_probs[ranked[1]]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_undecodable_tokens_are_sampled_if_named_and_rows_without_tokens_fail(
    undecodable, native, temperature, sampler
):
    sampler = Sampler(VOCAB, EOS, undecodable_ids=undecodable, native=native)
    logits, named = random_logits(5), undecodable[1]
    logits[:, list(undecodable)] = 40.0
    options = [
        *({"logit_bias": {named: 1.0}}, {"allowed_token_ids": (named, 4)}, {}),
        {"logit_bias": {named: -1.0, 4: 30.0}},
        {"logit_bias": {named: 0.0}, "bad_token_ids": ((undecodable[0],),)},
    ]
    rows = [Row(SamplingParams(temperature=temperature, **own)) for own in options]

    token_ids = [token.token_id for token in sampler.sample(logits, rows)]

    assert [token_ids[0], token_ids[1], token_ids[3], token_ids[4]] == [named, named, 4, named]
    assert token_ids[2] not in undecodable
    alone = [sampler.sample(logits[i : i + 1], [row])[0].token_id for i, row in enumerate(rows)]
    assert alone == token_ids

    banned = {"allowed_token_ids": (3,), "bad_token_ids": ((3,),), "logprobs": 1}
    empty = SamplingParams(temperature=temperature, **banned)
    tokens = sampler.sample(random_logits(2), [Row(empty), Row(SamplingParams())])
    assert "allowed_token_ids" in tokens[0].error
    assert tokens[1].error is None


def test_logits_are_copied_only_if_undecodable_tokens_are_between_others():
    logits, rows = random_logits(2), [Row(SamplingParams())] * 2

    def copies(undecodable):
        found = Sampler(VOCAB, EOS, undecodable_ids=undecodable).candidates(logits, rows)
        return found.data_ptr() != logits.data_ptr()

    assert not copies(())
    assert not copies(UNDECODABLE["tail"])
    assert copies(UNDECODABLE["holes"])


def test_logprobs_are_computed_from_the_unmodified_logits(sampler):
    logits = random_logits(1)
    ranked = logits[0].argsort(descending=True).tolist()
    params = SamplingParams(
        temperature=0.3, allowed_token_ids=(ranked[2],), logit_bias={ranked[2]: 9.0}, logprobs=2
    )

    (token,) = sampler.sample(logits, [Row(params)])

    expected = logits[0].log_softmax(dim=-1)
    assert (token.token_id, token.rank) == (ranked[2], 3)
    assert token.logprob == pytest.approx(float(expected[ranked[2]]))
    assert [token_id for token_id, _ in token.top_logprobs] == ranked[:2]
    values = [value for _, value in token.top_logprobs]
    assert values == pytest.approx(expected[ranked[:2]].tolist())
    rows = [Row(SamplingParams(logprobs=count)) for count in (None, 0, 1, 5)]
    none, *tokens = sampler.sample(random_logits(4), rows)
    assert none.top_logprobs is none.logprob is None
    assert [len(token.top_logprobs) for token in tokens] == [0, 1, 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1}]
)
def test_row_with_non_finite_logits_fails_alone(sampler, value, options):
    logits, params = random_logits(3), SamplingParams(logprobs=1, **options)
    rows = [Row(params, sampling_seed=seed) for seed in range(3)]
    expected = sampler.sample(logits, rows)
    logits[1, 60] = value
    first, broken, last = sampler.sample(logits, rows)
    assert broken.token_id == NO_TOKEN
    assert broken.error == "the model returned NaN or infinite logits"
    assert (first, last) == (expected[0], expected[2])


def test_rows_are_those_of_the_logits_and_non_finite_prompt_logits_refused(sampler):
    assert sampler.sample(torch.empty(0, VOCAB), []) == []
    with pytest.raises(InvariantError, match="2 rows"):
        sampler.sample(random_logits(1), [Row(SamplingParams())] * 2)
    with pytest.raises(InvariantError):
        sampler.sample(random_logits(1)[:, :-1], [Row(SamplingParams())])
    logits = random_logits(2)
    logits[1, 3] = float("nan")
    with pytest.raises(RequestError, match="NaN"):
        prompt_logprobs(logits, [1, 2], 0)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_prompt_logprobs_in_parts_equal_those_at_once(one_by_one, monkeypatch):
    monkeypatch.setattr("quire.sampling.sampler.PROMPT_ROWS_AT_ONCE", 3)
    logits, following = random_logits(8), [*range(20, 26), 20, 100]
    scored = prompt_logprobs(logits, following, 2, one_by_one=one_by_one)

    expected = logits.log_softmax(dim=-1)[range(8), following].tolist()
    ranks = 1 + (logits > logits[range(8), following][:, None]).sum(dim=1)
    assert [token.token_id for token in scored] == following
    assert [token.logprob for token in scored] == pytest.approx(expected)
    assert [token.rank for token in scored] == ranks.tolist()
    assert scored[7].top_logprobs[0][0] == logits[7].argmax()


def test_one_by_one_sampling_equals_batched_sampling_and_batches_greedy_rows(sampler, monkeypatch):
    """An argmax is exact: only rows with logprobs are computed one by one."""
    alone, sizes, sample = Sampler(VOCAB, EOS, one_by_one=True), [], Sampler.sample
    logits, rows = random_logits(len(MIXED)), mixed_rows()
    assert alone.sample(logits, rows) == sampler.sample(logits, rows)
    monkeypatch.setattr(
        Sampler, "sample", lambda self, x, rows: sizes.append(len(rows)) or sample(self, x, rows)
    )
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logprobs=1)):
        alone.sample(random_logits(3), [Row(params)] * 3)

    assert sizes == [3, 3, 1, 1, 1]
