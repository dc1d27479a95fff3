"""Sampling operations, compared with Transformers and with direct computation."""

import pytest
import torch
from transformers.generation import logits_process as reference

from quire.kernels import sampling

ROWS, VOCAB = 5, 300


@pytest.fixture
def logits():
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def history():
    return torch.randint(VOCAB, (ROWS, 40), generator=torch.Generator().manual_seed(8))


def pairs(history):
    row_ids = torch.arange(len(history)).repeat_interleave(history.shape[1])
    return row_ids, history.flatten()


def column(value):
    return torch.full((ROWS,), value)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_transformers(logits, history, penalty):
    expected = reference.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)

    seen = sampling.count_tokens(*pairs(history), ROWS, VOCAB) > 0
    got = sampling.penalize_repetition(logits, seen, column(penalty))

    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.5])
def test_temperature_equals_transformers(logits, history, temperature):
    expected = reference.TemperatureLogitsWarper(temperature)(history, logits)

    got = sampling.apply_temperature(logits, column(temperature))

    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [1, 5, VOCAB, 10 * VOCAB])
def test_top_k_equals_transformers(logits, history, count):
    expected = reference.TopKLogitsWarper(count)(history, logits)

    got = sampling.keep_top_k(logits, column(count))

    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("first_width", [1, 16, 1024])
def test_top_p_equals_transformers(logits, history, mass, first_width, monkeypatch):
    monkeypatch.setattr(sampling, "FIRST_TOP_P_WIDTH", first_width)
    expected = reference.TopPLogitsWarper(mass)(history, logits)

    got = sampling.keep_top_p(logits, column(mass))

    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.001, 0.1, 1.0])
def test_min_p_equals_transformers(logits, history, share):
    expected = reference.MinPLogitsWarper(share)(history, logits)

    got = sampling.keep_min_p(logits, column(share))

    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_presence_and_frequency_penalties_follow_openais_formula(logits):
    history = torch.tensor([[4, 4, 9]]).expand(ROWS, -1)
    counts = sampling.count_tokens(*pairs(history), ROWS, VOCAB)

    got = sampling.penalize_output(logits, counts, column(0.5), column(0.25))

    expected = logits.clone()
    expected[:, 4] -= 0.5 + 2 * 0.25
    expected[:, 9] -= 0.5 + 0.25
    torch.testing.assert_close(got, expected)


def test_each_row_has_its_own_limit(logits):
    counts = torch.tensor([1, 2, 3, 4, 300])
    masses = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    shares = torch.tensor([0.01, 0.1, 0.2, 0.5, 0.9])

    for keep, values in (
        (sampling.keep_top_k, counts),
        (sampling.keep_top_p, masses),
        (sampling.keep_min_p, shares),
    ):
        together = keep(logits, values)
        alone = [keep(logits[i : i + 1], values[i : i + 1]) for i in range(ROWS)]

        assert torch.equal(together, torch.cat(alone))


def test_tokens_tied_with_the_last_retained_token_are_retained():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]])

    assert sampling.keep_top_k(logits, torch.tensor([2])).isfinite().tolist() == [
        [False, True, True, True, True]
    ]
    assert sampling.keep_top_p(logits, torch.tensor([0.5])).isfinite().tolist() == [
        [False, True, True, True, True]
    ]


def test_keep_only_limits_only_the_named_rows(logits):
    got = sampling.keep_only(logits, torch.tensor([1, 1, 3]), torch.tensor([5, 6, 5]))

    assert got.isfinite().sum(dim=-1).tolist() == [VOCAB, 2, VOCAB, 1, VOCAB]
    assert torch.equal(got[1, 5:7], logits[1, 5:7])


def test_bias_does_not_unban_a_token(logits):
    row_ids, token_ids = torch.tensor([0, 2]), torch.tensor([3, 4])
    banned = sampling.ban(logits, row_ids, token_ids)

    got = sampling.add_bias(banned, row_ids, token_ids, torch.tensor([100.0, 100.0]))

    assert torch.equal(got, banned)
    assert got.isinf().nonzero().tolist() == [[0, 3], [2, 4]]


def test_sampling_operations_do_not_modify_their_input(logits):
    before = logits.clone()
    arguments = torch.tensor([0]), torch.tensor([1])

    sampling.ban(logits, *arguments)
    sampling.keep_only(logits, *arguments)
    sampling.add_bias(logits, *arguments, torch.tensor([1.0]))
    sampling.keep_top_k(logits, column(2))
    sampling.keep_top_p(logits, column(0.5))
    sampling.keep_min_p(logits, column(0.5))

    assert torch.equal(logits, before)


def test_draw_inverts_the_cumulative_distribution_in_id_order():
    shares = torch.tensor([[0.25, 0.0, 0.5, 0.25]])
    uniforms = [0.0, 0.249, 0.251, 0.749, 0.751, 1 - 2**-53]

    drawn = [
        int(sampling.draw(shares.log(), torch.tensor([uniform], dtype=torch.float64)))
        for uniform in uniforms
    ]

    assert drawn == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-53])
def test_draw_never_returns_a_banned_token(logits, edge):
    narrowed = sampling.keep_top_k(logits, column(3))

    drawn = sampling.draw(narrowed, torch.full((ROWS,), edge, dtype=torch.float64))

    assert narrowed.gather(1, drawn[:, None]).isfinite().all()


def test_banned_tokens_do_not_change_the_draw():
    few = torch.randn(1, 10, generator=torch.Generator().manual_seed(1))
    many = torch.full((1, 5000), -torch.inf)
    many[:, 400:4400:400] = few
    uniforms = torch.arange(1000, dtype=torch.float64) / 1000

    drawn = sampling.draw(few.expand(1000, -1), uniforms)

    assert torch.equal(sampling.draw(many.expand(1000, -1), uniforms), 400 + 400 * drawn)


def test_scores_are_log_softmax_and_ranks_count_from_one(logits):
    logits = logits.to(torch.bfloat16)
    token_ids = logits.argsort(dim=-1, descending=True)[:, 0]

    logprobs, ranks, top_values, top_ids = sampling.score(logits, token_ids, 4)

    expected = logits.float().log_softmax(dim=-1)
    torch.testing.assert_close(logprobs, expected.amax(dim=-1))
    assert ranks.tolist() == [1] * ROWS
    torch.testing.assert_close(top_values, expected.topk(4).values)
    torch.testing.assert_close(expected.gather(1, top_ids), top_values)
