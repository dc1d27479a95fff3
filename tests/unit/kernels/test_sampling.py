"""Sampling: torch against Transformers and direct computation, C against torch."""

import math
import random

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

from quire.kernels import sampling
from quire.kernels.native.arguments import AVX2
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.sampling import RowOptions, RowSampling

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


PROCESSORS = {  # ours, that of Transformers, the tolerance
    "penalize_repetition": (reference.RepetitionPenaltyLogitsProcessor, 0),
    "apply_temperature": (reference.TemperatureLogitsWarper, 1e-6),
    "keep_top_k": (reference.TopKLogitsWarper, 0),
    "keep_min_p": (reference.MinPLogitsWarper, 0),
}
VALUES = [
    *[("penalize_repetition", value) for value in (0.5, 1.0, 1.3)],
    *[("apply_temperature", value) for value in (0.1, 1.0, 2.5)],
    *[("keep_top_k", value) for value in (1, 5, VOCAB, 10 * VOCAB)],
    *[("keep_min_p", value) for value in (0.001, 0.1, 1.0)],
]


def test_processors_equal_those_of_transformers_and_openais_penalties(logits, history):
    seen = sampling.count_tokens(*pairs(history), ROWS, VOCAB) > 0
    for name, value in VALUES:
        processor, rtol = PROCESSORS[name]
        arguments = (seen, column(value)) if name == "penalize_repetition" else (column(value),)
        got = getattr(sampling, name)(logits, *arguments)
        torch.testing.assert_close(got, processor(value)(history, logits), rtol=rtol, atol=0)

    history = torch.tensor([[4, 4, 9]]).expand(ROWS, -1)
    counts = sampling.count_tokens(*pairs(history), ROWS, VOCAB)

    got = sampling.penalize_output(logits, counts, column(0.5), column(0.25))

    expected = logits.clone()
    expected[:, 4] -= 0.5 + 2 * 0.25
    expected[:, 9] -= 0.5 + 0.25
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("first_width", [1, 16, 1024])
def test_top_p_equals_transformers(logits, history, mass, first_width, monkeypatch):
    monkeypatch.setattr(sampling, "FIRST_TOP_P_WIDTH", first_width)
    expected = reference.TopPLogitsWarper(mass)(history, logits)

    torch.testing.assert_close(sampling.keep_top_p(logits, column(mass)), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("keep", "values"),
    [
        (sampling.keep_top_k, [1, 2, 3, 4, 300]),
        (sampling.keep_top_p, [0.1, 0.3, 0.5, 0.7, 0.9]),
        (sampling.keep_min_p, [0.01, 0.1, 0.2, 0.5, 0.9]),
    ],
)
def test_each_row_has_its_own_limit(logits, keep, values):
    values = torch.tensor(values)
    alone = [keep(logits[i : i + 1], values[i : i + 1]) for i in range(ROWS)]
    assert torch.equal(keep(logits, values), torch.cat(alone))


def test_tokens_tied_with_the_last_retained_token_are_retained():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]])
    for kept in (
        sampling.keep_top_k(logits, torch.tensor([2])),
        sampling.keep_top_p(logits, torch.tensor([0.5])),
    ):
        assert kept.isfinite().tolist() == [[False, True, True, True, True]]


def test_named_rows_are_limited_bias_unbans_no_token_and_inputs_are_unchanged(logits):
    before, row_ids, token_ids = logits.clone(), torch.tensor([0, 2]), torch.tensor([3, 4])
    banned = sampling.ban(logits, row_ids, token_ids)
    assert torch.equal(logits, before)
    got = sampling.add_bias(banned, row_ids, token_ids, torch.tensor([100.0, 100.0]))
    assert torch.equal(got, banned)
    assert got.isinf().nonzero().tolist() == [[0, 3], [2, 4]]
    sampling.add_bias(logits, row_ids, token_ids, torch.tensor([1.0, 1.0]))

    got = sampling.keep_only(logits, torch.tensor([1, 1, 3]), torch.tensor([5, 6, 5]))
    assert got.isfinite().sum(dim=-1).tolist() == [VOCAB, 2, VOCAB, 1, VOCAB]
    assert torch.equal(got[1, 5:7], logits[1, 5:7])
    for keep, value in (("top_k", 2), ("top_p", 0.5), ("min_p", 0.5)):
        getattr(sampling, f"keep_{keep}")(logits, column(value))
    assert torch.equal(logits, before)


def test_draw_inverts_the_cumulative_distribution_of_tokens_that_are_not_banned(logits):
    shares = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).expand(6, -1)
    uniforms = torch.tensor([0.0, 0.249, 0.251, 0.749, 0.751, 1 - 2**-53], dtype=torch.float64)

    assert sampling.draw(shares.log(), uniforms).tolist() == [0, 0, 2, 2, 3, 3]

    narrowed = sampling.keep_top_k(logits, column(3))
    for edge in (0.0, 1 - 2**-53):
        drawn = sampling.draw(narrowed, torch.full((ROWS,), edge, dtype=torch.float64))
        assert narrowed.gather(1, drawn[:, None]).isfinite().all()
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


LIBRARY = load_library()
PATHS = range(AVX2, LIBRARY.best_path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
GREEDY = RowOptions(0, 0, 0.0)
SIZE = 1000


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def native(request):
    return RowSampling(LIBRARY, request.param)


def random_logits(rows, vocab=SIZE, seed=5):
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def expected_token(logits, options):
    """The token of one row by the operations of torch."""
    if not options.temperature:
        return int(logits.argmax())
    logits = sampling.apply_temperature(logits[None], torch.tensor([options.temperature]))
    if options.top_k:
        logits = sampling.keep_top_k(logits, torch.tensor([options.top_k]))
    if options.top_p < 1:
        logits = sampling.keep_top_p(logits, torch.tensor([options.top_p], dtype=torch.float64))
    if options.min_p:
        logits = sampling.keep_min_p(logits, torch.tensor([options.min_p], dtype=torch.float64))
    key = np.array([options.seed, options.position], dtype=np.uint64)
    uniform = (int(np.random.Philox(key=key).random_raw()) >> 11) * 2.0**-53
    return int(sampling.draw(logits, torch.tensor([uniform], dtype=torch.float64)))


def random_options(choose):
    return RowOptions(
        seed=choose.getrandbits(64),
        position=choose.randrange(2**20),
        temperature=choose.choice([0.0, 0.3, 0.8, 1.0, 2.0, 50.0]),
        top_k=choose.choice([0, 0, 1, 5, 40, 300, 10**12]),
        top_p=choose.choice([1.0, 1e-6, 0.1, 0.5, 0.95, 0.999]),
        min_p=choose.choice([0.0, 0.0, 0.01, 0.1, 1.0]),
    )


@pytest.mark.parametrize("vocab", [1, 2, 17, 255, 256, 257, 5000, 32000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 12.0])
def test_tokens_equal_those_of_torch(native, vocab, spread):
    choose = random.Random(vocab)
    logits = spread * random_logits(12, vocab)
    logits[4:8, 1::3] = -math.inf
    logits[8:] = logits[8:].round()  # ties
    options = [random_options(choose) for _ in logits]

    tokens, failed = native.sample(logits, options)

    assert tokens == [expected_token(row, o) for row, o in zip(logits, options, strict=True)]
    assert not failed


def test_draws_of_torch_and_of_c_are_equal_at_many_positions_and_with_strides(native):
    logits = random_logits(1).expand(200, -1)
    options = [RowOptions(9, n, 0.9, top_k=100, top_p=0.9) for n in range(200)]

    tokens, _ = native.sample(logits, options)

    assert tokens == [expected_token(logits[0], o) for o in options]
    assert len(set(tokens)) > 5

    wide = torch.full((3, SIZE + 7), 99.0)
    wide[:, :SIZE] = random_logits(3)
    options = [RowOptions(1, n, 1.0) for n in range(3)]

    assert native.sample(wide[:, :SIZE], options) == native.sample(random_logits(3), options)
    assert native.likeliest(wide[:, :SIZE])[0] == random_logits(3).argmax(dim=1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 3, SIZE - 1])
def test_a_row_with_a_wrong_number_fails_alone(native, value, column):
    logits, options = random_logits(3, SIZE - 3), [RowOptions(1, n, 1.0) for n in range(3)]
    expected, _ = native.sample(logits, options)
    logits[1, min(column, SIZE - 4)] = value

    tokens, failed = native.sample(logits, options)

    assert failed == [1]
    assert native.likeliest(logits)[1] == [1]
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


def test_the_first_of_the_likeliest_is_chosen_and_rows_without_tokens_or_that_overflow_fail(native):
    logits = random_logits(3)
    logits[0], logits[2] = -math.inf, 1e30
    options = [RowOptions(1, 1, 1.0, top_p=0.5), GREEDY, RowOptions(1, 1, 1e-20)]

    assert native.sample(logits, options)[1] == [0, 2]
    logits = torch.zeros(2, SIZE)
    logits[1, [70, 300, SIZE - 1]] = 2.0

    assert native.likeliest(logits) == ([0, 70], [])
    assert native.sample(logits, [GREEDY, GREEDY]) == ([0, 70], [])
