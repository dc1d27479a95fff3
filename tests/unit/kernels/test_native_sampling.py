"""Sampling in C against the operations of torch, on every code path of this CPU."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import sampling
from quire.kernels.native.arguments import AVX2
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.sampling import RowOptions, RowSampling

LIBRARY = load_library()
PATHS = range(AVX2, LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
GREEDY = RowOptions(0, 0, 0.0)
VOCAB = 1000

pytestmark = pytest.mark.skipif(not PATHS, reason="no C extension with vector instructions")


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def native(request: pytest.FixtureRequest) -> RowSampling:
    assert isinstance(LIBRARY, NativeLibrary)
    return RowSampling(LIBRARY, request.param)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 5) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def expected_token(logits: Tensor, options: RowOptions) -> int:
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


def random_options(choose: random.Random) -> RowOptions:
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
def test_tokens_equal_those_of_torch(native: RowSampling, vocab: int, spread: float) -> None:
    choose = random.Random(vocab)
    logits = spread * random_logits(12, vocab)
    logits[4:8, 1::3] = -math.inf
    logits[8:] = logits[8:].round()  # ties
    options = [random_options(choose) for _ in logits]

    tokens, failed = native.sample(logits, options)

    assert tokens == [expected_token(row, o) for row, o in zip(logits, options, strict=True)]
    assert not failed


def test_draws_of_torch_and_of_c_are_equal_at_many_positions(native: RowSampling) -> None:
    logits = random_logits(1).expand(200, -1)
    options = [RowOptions(9, n, 0.9, top_k=100, top_p=0.9) for n in range(200)]

    tokens, _ = native.sample(logits, options)

    assert tokens == [expected_token(logits[0], o) for o in options]
    assert len(set(tokens)) > 5


def test_rows_of_a_wider_tensor_are_read_by_their_stride(native: RowSampling) -> None:
    wide = torch.full((3, VOCAB + 7), 99.0)
    wide[:, :VOCAB] = random_logits(3)
    options = [RowOptions(1, n, 1.0) for n in range(3)]

    assert native.sample(wide[:, :VOCAB], options) == native.sample(random_logits(3), options)
    assert native.likeliest(wide[:, :VOCAB])[0] == random_logits(3).argmax(dim=1).tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("column", [0, 3, VOCAB - 1])
def test_a_row_with_a_wrong_number_fails_alone(
    native: RowSampling, value: float, column: int
) -> None:
    logits, options = random_logits(3, VOCAB - 3), [RowOptions(1, n, 1.0) for n in range(3)]
    expected, _ = native.sample(logits, options)
    logits[1, min(column, VOCAB - 4)] = value

    tokens, failed = native.sample(logits, options)

    assert failed == [1]
    assert native.likeliest(logits)[1] == [1]
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


def test_a_row_without_tokens_fails(native: RowSampling) -> None:
    logits = random_logits(2)
    logits[0] = -math.inf

    assert native.sample(logits, [RowOptions(1, 1, 1.0, top_p=0.5), GREEDY])[1] == [0]


def test_a_row_that_overflows_fails(native: RowSampling) -> None:
    logits = torch.full((1, VOCAB), 1e30)

    assert native.sample(logits, [RowOptions(1, 1, 1e-20)])[1] == [0]


def test_the_first_of_the_likeliest_tokens_is_chosen(native: RowSampling) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [70, 300, VOCAB - 1]] = 2.0

    assert native.likeliest(logits) == ([0, 70], [])
    assert native.sample(logits, [GREEDY, GREEDY]) == ([0, 70], [])
