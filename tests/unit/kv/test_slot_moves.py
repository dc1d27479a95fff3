"""Slot moves of compactions, and the check that no retained slot is lost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.errors import ConfigError, InvariantError
from quire.kv.slot_moves import (
    SlotMoves,
    close_gaps,
    fill_holes,
    no_moves,
    prove_one_to_one,
    retained_pages,
)
from support.small_memory import mask

MASKS = hnp.arrays(bool, st.tuples(st.integers(1, 3), st.integers(0, 20)))


def counts(numbers):
    return np.array(numbers, dtype=np.int32)


def moved(keep, moves):
    """For each slot after the moves, the number of its source slot."""
    lanes = [list(range(keep.shape[1])) for _ in keep]
    for lane, source, target in zip(moves.lane, moves.source, moves.target, strict=True):
        lanes[lane][target] = int(source)
    return [lane[: int(count)] for lane, count in zip(lanes, keep.sum(axis=1), strict=True)]


def test_moves_of_both_kinds_for_an_example_mask():
    keep = mask("oxooxoxoox")

    assert moved(keep, fill_holes(keep)) == [[0, 7, 2, 3, 8, 5]]
    assert moved(keep, close_gaps(keep)) == [[0, 2, 3, 5, 7, 8]]


@given(keep=MASKS)
def test_moves_retain_exactly_the_mask_in_the_first_slots(keep):
    for move in (fill_holes, close_gaps):
        moves = move(keep)
        prove_one_to_one(keep, moves)
        assert [sorted(lane) for lane in moved(keep, moves)] == [
            np.flatnonzero(lane).tolist() for lane in keep
        ]
    assert all(lane == sorted(lane) for lane in moved(keep, close_gaps(keep)))


@given(keep=MASKS)
def test_fill_holes_needs_at_max_the_moves_of_close_gaps(keep):
    assert len(fill_holes(keep)) <= len(close_gaps(keep))


SOUND = fill_holes(mask("oxoxo", "ooooo"))  # slot 4 into slot 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (no_moves(), "leaves a hole"),
        (replace(SOUND, source=np.array([3])), "an evicted slot"),
        (replace(SOUND, source=np.array([5])), "do not exist"),
        (replace(SOUND, target=np.array([-1])), "do not exist"),
        (replace(SOUND, target=np.array([2])), "overwrites a retained slot"),
        (replace(SOUND, target=np.array([3])), "leaves a hole"),
        (replace(SOUND, lane=np.array([1])), "overwrites a retained slot"),
        (
            SlotMoves(*(np.repeat(part, 2) for part in (SOUND.lane, SOUND.source, SOUND.target))),
            "moves a slot twice",
        ),
        (SlotMoves(np.array([0, 0]), np.array([4, 2]), np.array([1, 1])), "two slots into one"),
    ],
)
def test_prove_one_to_one_rejects_moves_that_lose_a_slot(broken, message):
    with pytest.raises(InvariantError, match=message):
        prove_one_to_one(mask("oxoxo", "ooooo"), broken)


def test_retained_pages_of_a_mask_of_whole_pages():
    keep = mask("ooooxxxxoo", "xxxxooooxx")

    retained = retained_pages(keep, counts([10, 10]), 4)

    assert retained.tolist() == [[True, False, True], [False, True, False]]


def test_last_page_of_a_lane_may_be_partly_filled():
    keep = mask("oooooxx", "xxxxooo")

    assert retained_pages(keep, counts([5, 7]), 4).tolist() == [[True, True], [False, True]]
    with pytest.raises(ConfigError, match="page 1 of lane 0 with 1 of 2 slots retained"):
        retained_pages(keep, counts([6, 7]), 4)


@pytest.mark.parametrize("text", ["xooooooo", "ooxooooo", "ooooooox"])
def test_mask_that_splits_a_page_is_rejected(text):
    with pytest.raises(ConfigError, match="3 of 4 slots retained"):
        retained_pages(mask(text), counts([8]), 4)
