"""Promoted tokens (mixed precision), compared with `full_precision_account` token by token.

A round promotes some tokens of the full-precision window, up to the number of free records. Then
tokens are evicted, and their records are free again.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gathered import GatheredAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.token_precision import records_of
from quire.kv.lane_reader import LaneReader, VectorReader
from quire.kv.sharing import (
    reference_pages,
    reference_statistics,
    referenced_statistics_pages,
    start_from_references,
)
from quire.layout.pages import KEY, VALUE
from support.full_precision_account import CPU, PAGE, WINDOW, CheckedMemory, play

FORMATS = [
    "int2+residual=6+promoted=3:int8",
    "int4+sinks=2+residual=4+promoted=2:int4/fp8",
    "int4:group=8/int2+residual=9+promoted=5:int8/int4_outliers",
]


def recorded_positions(checked: CheckedMemory, row: int) -> np.ndarray:
    """Positions of the tokens with a record, [lanes, records]; -1 for free records."""
    buffer = checked.kv.promoted["full"]
    return buffer.marks[torch.from_numpy(buffer.table.pages[row, :, 0]).long()].long().numpy() - 1


def promote_and_evict(checked: CheckedMemory, row: int, *, pages: bool = False) -> None:
    """Promote random tokens of each lane, then evict some tokens or pages."""
    buffer = checked.kv.promoted["full"]
    window = checked.kv.full_precision["full"]
    length = int(checked.memory.lengths[row])
    reader = LaneReader(checked.kv, "full", row)
    found = recorded_positions(checked, row)
    per_layer = len(found) // 2
    for lane, positions in enumerate(reader.lane_positions):
        found[lane][~np.isin(found[lane], positions)] = -1
        newest = positions[(positions >= length - window.tokens.recent) & (positions >= 0)]
        candidates = checked.rng.permutation(np.setdiff1d(newest, found[lane]))
        free = np.flatnonzero(found[lane] < 0)
        chosen = candidates[: min(len(free), int(checked.rng.integers(4)))].astype(np.int64)
        at = np.full(len(chosen), lane), free[: len(chosen)]
        index = np.searchsorted(positions[: np.count_nonzero(positions >= 0)], chosen)
        key, value = (VectorReader(reader, plane).lost(at[0], index) for plane in (KEY, VALUE))
        buffer.put(row, at, chosen, (key, value))
        heads = range(2) if per_layer == 1 else range(lane % 2, lane % 2 + 1)
        for position in chosen.tolist():
            checked.account.promote_token(row, (0, 2)[lane // per_layer], position, heads)
    checked.compare(row)
    (checked.evict_pages if pages else checked.evict_tokens)(row)


@pytest.mark.parametrize(
    ("text", "heads_apart", "backend"),
    [
        pytest.param(text, apart, backend, marks=[] if (i + j + k) % 2 == 0 else [pytest.mark.slow])
        for i, text in enumerate(FORMATS)
        for j, apart in enumerate((False, True))
        for k, backend in enumerate(("gathered", "reference"))
    ],
)
@settings(max_examples=2)
@given(seed=st.integers(0, 10_000), pages=st.booleans())
def test_attention_equals_the_account_with_promoted_tokens(text, heads_apart, backend, seed, pages):
    attention = GatheredAttention(CPU) if backend == "gathered" else ReferenceAttention()
    form = f"{text}+plain=float32"
    checked = CheckedMemory(form, attention, seed, evicting=True, heads_apart=heads_apart)

    play(checked, lambda row: promote_and_evict(checked, row, pages=pages))

    promoted = [
        token
        for _, lanes in checked.account.rows.values()
        for lane in lanes
        for page in lane.pages
        for token in page
        if token.promoted
    ]
    records = sum(
        int(np.count_nonzero(recorded_positions(checked, row) >= 0)) for row in checked.account.rows
    )
    assert records >= len(promoted)


def test_row_without_evictions_has_no_record():
    """New pages of records are cleared, with any previous content."""
    text = f"{FORMATS[0]}+plain=float32"
    checked = CheckedMemory(text, GatheredAttention(CPU), evicting=True)
    row = checked.start()

    checked.step({row: 20})

    assert (recorded_positions(checked, row) == -1).all()


def test_cached_prefix_is_shared_without_records():
    """Pages without records are not copied."""
    text = f"{FORMATS[0]}+plain=float32"
    checked = CheckedMemory(text, GatheredAttention(CPU), evicting=True)
    row = checked.start()
    checked.step({row: 2 * PAGE})
    free_bytes = checked.memory.free_bytes
    pages = referenced_statistics_pages(checked.memory, row)
    statistics = reference_statistics(checked.memory, row)
    copied = sum(page_class.page_bytes * n for page_class, n in pages.items())

    assert set(statistics.pages) == {"full.full_precision", f"window_{WINDOW}.full_precision"}
    assert free_bytes - checked.memory.free_bytes == copied
    shared_row = start_from_references(
        checked.memory, [reference_pages(checked.memory, row, 0, 2 * PAGE)], statistics
    )
    assert (recorded_positions(checked, shared_row) == -1).all()
    checked.memory.check()


def test_records_of_returns_minus_one_without_record_or_token():
    marks = torch.tensor([[0, 8, 3], [0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([[2, 7, 0, 999, -1], [2, 7, 0, -50, 1 << 30]])

    found = records_of(marks, positions)

    assert found.tolist() == [[2, 1, -1, -1, -1], [-1] * 5]


def test_records_of_needs_memory_for_the_lane_only():
    """A table of all possible positions would need a terabyte."""
    furthest = (1 << 31) - 2
    marks = torch.tensor([[0, furthest + 1]], dtype=torch.int32).repeat(64, 1)
    positions = torch.tensor([[0, furthest - 1, furthest]]).repeat(64, 1)

    assert records_of(marks, positions).tolist() == [[-1, -1, 1]] * 64
