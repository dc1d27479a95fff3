"""Tokens in a finer codec than the others of their lane: token by token, as `kept_account` tells.

A round raises some of the tokens that are still kept as they were made, as many as there are free
records; then tokens leave, and records of those are free again.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.token_precision import records_of
from quire.kv.lane_reader import LaneReader
from quire.kv.sharing import (
    reference_pages,
    reference_statistics,
    referenced_statistics_pages,
    start_from_references,
)
from unit.kv.full_precision_account import CPU, PAGE, WINDOW, Checked, play

FORMATS = [
    "int2+residual=6+promoted=3:int8",
    "int4+sinks=2+residual=4+promoted=2:int8/fp8",
    "int4:group=8/int2+residual=9+promoted=5:int8/int4_outliers",
]


def held(checked: Checked, row: int) -> np.ndarray:
    """[lanes, records] positions of the tokens a row has records of; -1 for nobody's."""
    place = checked.kv.promoted["full"]
    return place.marks[torch.from_numpy(place.table.pages[row, :, 0]).long()].long().numpy() - 1


def raise_and_evict(checked: Checked, row: int, *, pages: bool = False) -> None:
    """Lanes raise tokens of their own choice; then some leave."""
    place = checked.kv.promoted["full"]
    kept = checked.kv.kept["full"]
    length = int(checked.memory.lengths[row])
    reader = LaneReader(checked.kv, "full", row)
    found = held(checked, row)
    per_layer = len(found) // 2
    for lane, positions in enumerate(reader.lane_positions):
        found[lane][~np.isin(found[lane], positions)] = -1
        newest = positions[(positions >= length - kept.tokens.recent) & (positions >= 0)]
        wanted = checked.rng.permutation(np.setdiff1d(newest, found[lane]))
        free = np.flatnonzero(found[lane] < 0)
        chosen = wanted[: min(len(free), int(checked.rng.integers(4)))].astype(np.int64)
        at = np.full(len(chosen), lane), free[: len(chosen)]
        place.put(row, at, chosen, kept)
        heads = range(2) if per_layer == 1 else range(lane % 2, lane % 2 + 1)
        for position in chosen.tolist():
            checked.account.raise_token(row, (0, 2)[lane // per_layer], position, heads)
    checked.compare(row)
    (checked.evict_pages if pages else checked.evict_tokens)(row)


@pytest.mark.parametrize("backend", ["gathered", "reference"])
@pytest.mark.parametrize("heads_apart", [False, True])
@pytest.mark.parametrize("text", FORMATS)
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000), pages=st.booleans())
def test_raised_tokens_are_attended_finer_until_they_leave(text, heads_apart, backend, seed, pages):
    made = GatheredAttention(CPU) if backend == "gathered" else ReferenceAttention()
    form = f"{text}+plain=float32"
    checked = Checked(form, made, seed, evicting=True, heads_apart=heads_apart)

    play(checked, lambda row: raise_and_evict(checked, row, pages=pages))

    promoted = [
        token
        for _, lanes in checked.account.rows.values()
        for lane in lanes
        for page in lane.pages
        for token in page
        if token.finer
    ]
    records = sum(int(np.count_nonzero(held(checked, row) >= 0)) for row in checked.account.rows)
    assert records >= len(promoted)


def test_a_row_that_was_never_evicted_has_no_record():
    """Pages of records begin clean, whatever lay there before."""
    text = f"{FORMATS[0]}+plain=float32"
    checked = Checked(text, GatheredAttention(CPU), evicting=True)
    row = checked.start()

    checked.step({row: 20})

    assert (held(checked, row) == -1).all()


def test_a_prefix_is_lent_without_records_and_borrowed_with_blank_ones():
    """No copy of pages in which nobody has anything yet."""
    text = f"{FORMATS[0]}+plain=float32"
    checked = Checked(text, GatheredAttention(CPU), evicting=True)
    row = checked.start()
    checked.step({row: 2 * PAGE})
    free_bytes = checked.memory.free_bytes
    pages = referenced_statistics_pages(checked.memory, row)
    statistics = reference_statistics(checked.memory, row)
    copied = sum(page_class.page_bytes * n for page_class, n in pages.items())

    assert set(statistics.pages) == {"full.kept", f"window_{WINDOW}.kept"}
    assert free_bytes - checked.memory.free_bytes == copied
    borrower = start_from_references(
        checked.memory, [reference_pages(checked.memory, row, 0, 2 * PAGE)], statistics
    )
    assert (held(checked, borrower) == -1).all()
    checked.memory.check()


def test_slots_without_a_record_and_slots_without_a_token_find_none():
    marks = torch.tensor([[0, 8, 3], [0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([[2, 7, 0, 999, -1], [2, 7, 0, -50, 1 << 30]])

    found = records_of(marks, positions)

    assert found.tolist() == [[2, 1, -1, -1, -1], [-1] * 5]


def test_a_stream_without_an_end_costs_no_more_than_its_lane():
    """A table of all positions there could be would take a terabyte here."""
    furthest = (1 << 31) - 2
    marks = torch.tensor([[0, furthest + 1]], dtype=torch.int32).repeat(64, 1)
    positions = torch.tensor([[0, furthest - 1, furthest]]).repeat(64, 1)

    assert records_of(marks, positions).tolist() == [[-1, -1, 1]] * 64
