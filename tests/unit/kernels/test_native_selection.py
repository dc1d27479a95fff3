"""Selection of tokens in C against NumPy, on every code path."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.selection import NativeSelection
from quire.policies.choose import best_with_numpy
from quire.policies.signatures.anchors import MEAN, Signatures, anchor_distance, fixed_anchor
from quire.policies.signatures.context import aligned_words
from quire.policies.signatures.representatives import choose_best, choose_representatives
from quire.policies.signatures.units import Units
from support.pairwise import every_pair

LIBRARY = load_library()
PATHS = range(LIBRARY.best_path + 1) if isinstance(LIBRARY, NativeLibrary) else ()

pytestmark = pytest.mark.skipif(not PATHS, reason="no C extension")


@pytest.fixture(params=PATHS, ids=lambda path: f"path{path}")
def selection(request):
    return NativeSelection(replace(LIBRARY, path=request.param))


SCORES = {
    "spread": lambda rng, shape: rng.exponential(size=shape),
    "signed": lambda rng, shape: rng.normal(size=shape),
    "tied": lambda rng, shape: rng.integers(-2, 3, shape),
    "equal": lambda rng, shape: np.full(shape, -1.5),
    "zeros of both signs": lambda rng, shape: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
    "extremes": lambda rng, shape: rng.choice([3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0], shape),
    "peaked": lambda rng, shape: 10.0 ** rng.uniform(-40, 38, shape),
}


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 304])
def test_best_columns_equal_those_of_numpy(selection, kind, columns):
    rng = np.random.default_rng(columns)
    score = SCORES[kind](rng, (40, columns)).astype(np.float32)
    free = rng.random(score.shape) < rng.choice([0.1, 0.7, 1.0], (40, 1))
    wanted = rng.integers(0, columns + 2, 40)
    score[~free & (rng.random(score.shape) < 0.5)] = np.nan  # not read

    found = selection.best(score, free, wanted)

    expected = best_with_numpy(np.where(free, score, 0), free, wanted)
    assert np.array_equal(found, expected)


def test_heads_share_free_columns_and_scores_may_be_a_slice(selection):
    rng = np.random.default_rng(0)
    score = rng.normal(size=(6, 5, 90)).astype(np.float32)[:, :, 7:60]
    free, wanted = rng.random((6, 53)) < 0.8, rng.integers(0, 53, 6)

    found = selection.best(score, free, wanted)

    assert np.array_equal(found, best_with_numpy(score, free[:, None], wanted[:, None]))


@pytest.mark.parametrize(("rows_per_layer", "heads"), [(1, 5), (1, 64), (2, 3), (4, 16), (64, 1)])
@pytest.mark.parametrize("spread", [1, 1.5, 40])
def test_signed_slots_equal_those_of_numpy(selection, rows_per_layer, heads, spread):
    rng = np.random.default_rng(heads)
    for slots in (1, 50, 90):
        rows, most = 2 * rows_per_layer, rng.choice([1.0, 0.5, 0.0])
        positions = np.full((rows, slots), -1)
        for row, held in enumerate(rng.integers(1, slots + 1, rows)):
            positions[row, :held] = np.sort(rng.permutation(int(spread * slots))[:held])
        live = positions >= 0
        protected = (rng.random(live.shape) < 0.3) | (np.arange(slots) >= most * slots)
        keep = rng.integers(0, slots + 1, rows)
        score = rng.normal(size=(rows, heads, slots)).astype(np.float32)

        columns, free, retained, words = selection.signed(
            *map(torch.from_numpy, (live, protected, keep, score, positions)),
            past_end=int(positions.max(initial=0)) + 1,
            rows_per_layer=rows_per_layer,
        )

        expected = Units.of(live, protected, keep, 1)
        assert columns == expected.columns
        assert np.array_equal(free, expected.free_slots)
        assert np.array_equal(retained, expected.num_retained)
        bits = best_with_numpy(score[:, :, columns], free[:, None], retained[:, None])
        must, held = live & protected, live[:, columns]
        of_numpy = aligned_words(bits, must, positions, rows_per_layer, columns)[:, :, 0]
        assert np.array_equal(words[held & free], of_numpy[held & free])


@pytest.mark.parametrize("anchor", [MEAN, "random", "alternating", "zeros", "ones"])
@pytest.mark.parametrize(("width", "words"), [(3, 1), (64, 1), (20, 4), (100, 6)])
def test_representatives_equal_those_of_numpy(selection, anchor, width, words):
    rng = np.random.default_rng(width)
    marks, bits = (
        rng.integers(0, most, (30, 45, words), dtype=np.uint64) for most in (2, 1 << min(width, 63))
    )
    grouped = rng.random((30, 45)) < rng.choice([0.1, 0.6, 1.0], (30, 1))
    signed = Signatures(marks * bits, width, grouped, tuple(range(30)))
    count = rng.integers(0, 47, 30)
    score = rng.integers(0, 6, (30, 60)).astype(np.float32)[:, :45]
    given = None if anchor == MEAN else fixed_anchor(signed, anchor, seed=3)

    middle = selection.representatives(signed.words, signed.grouped, count, given)
    best = selection.representatives(signed.words, signed.grouped, count, given, score)

    distance = anchor_distance(signed, anchor, seed=3)
    assert np.array_equal(middle, choose_representatives(distance, signed.grouped, count))
    assert np.array_equal(best, choose_best(distance, signed.grouped, count, score))


@every_pair(pick_best=[False, True], anchor=[MEAN, "random"], words=[1, 2])
def test_retained_slots_equal_those_of_numpy(selection, words, anchor, pick_best):
    rng = np.random.default_rng(words)
    rows, slots = 20, 90
    live = np.arange(slots) < rng.integers(40, slots + 1, (rows, 1))
    protected = np.arange(slots) < rng.integers(0, 9, (rows, 1))
    keep = rng.integers(10, 80, rows)
    units = Units.of(live, protected, keep, 1)
    columns, free, wanted = units.columns, units.free_slots, units.num_retained
    count = np.minimum(rng.integers(0, 30, rows), wanted)
    score = rng.integers(0, 40, (rows, 95)).astype(np.float32)[:, : free.shape[1]]
    bits = rng.integers(0, 1 << 12, (*free.shape, words), dtype=np.uint64)
    signed = Signatures(bits, 64 * words, free, (*range(rows),))
    given = None if anchor == MEAN else fixed_anchor(signed, anchor, seed=3)

    numbers, options = (wanted, count), {"anchor": given, "pick_best": pick_best}
    found = selection.retained(live, free, columns.start, *numbers, bits, score, **options)

    important = best_with_numpy(score, free, wanted - count)
    signed = replace(signed, grouped=free & ~important)
    distance = anchor_distance(signed, anchor, seed=3)
    chosen = choose_representatives(distance, signed.grouped, count)
    if pick_best:
        chosen = choose_best(distance, signed.grouped, count, score)
    expected = live.copy()
    expected[:, columns] &= important | chosen | ~free
    assert np.array_equal(found, expected)


def test_rows_without_units_have_no_representatives(selection):
    words, empty = np.zeros((3, 0, 1), dtype=np.uint64), np.zeros((3, 0), dtype=bool)
    assert selection.representatives(words, empty, np.ones(3, dtype=np.int64)).shape == (3, 0)
