"""Extents compared with a plain array of the owner of each byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvariantError
from quire.kv.extents import Extent, ExtentMap

TOTAL = 64


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 4, 8])) | st.integers(0, 20),
        max_size=40,
    )
)
def test_extents_never_overlap_and_are_allocated_if_whole_units_fit(actions):
    space, held, owner = ExtentMap(TOTAL), [], [None] * TOTAL
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            units, unit_bytes = action
            holes = free_runs(owner)
            allocated = space.allocate(units, unit_bytes)
            assert (allocated is not None) == (sum(run // unit_bytes for run in holes) >= units)
            if allocated is None:
                continue
            assert sum(e.num_bytes for e in allocated) == units * unit_bytes
            assert all(e.num_bytes % unit_bytes == 0 for e in allocated)
            if max(holes, default=0) >= units * unit_bytes:
                assert len(allocated) <= 1
            for extent in allocated:
                assert owner[extent.start : extent.end] == [None] * extent.num_bytes
                owner[extent.start : extent.end] = [number] * extent.num_bytes
            held.append(allocated)
        elif held:
            released = held.pop(action % len(held))
            space.release(released)
            for extent in released:
                owner[extent.start : extent.end] = [None] * extent.num_bytes
        space.check(tuple(e for extents in held for e in extents))
        assert space.free_bytes == owner.count(None)
        assert [e.num_bytes for e in space.free_extents] == free_runs(owner)


def free_runs(owner):
    """Lengths of the runs of free bytes."""
    runs, length = [], 0
    for holder in [*owner, "end"]:
        if holder is None:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


def test_allocation_uses_the_lowest_sufficient_hole():
    space = ExtentMap(20)
    first, _, _ = (space.allocate(n, 1) for n in (4, 2, 8))
    space.release(first)

    assert space.allocate(3, 1) == (Extent(0, 3),)
    assert space.allocate(3, 1) == (Extent(14, 3),)


def test_release_of_free_bytes_is_rejected():
    space = ExtentMap(20)
    extents = space.allocate(2, 5)
    space.release(extents)

    for wrong in (*extents, Extent(15, 10)):
        with pytest.raises(InvariantError, match="was never allocated"):
            space.release((wrong,))


def test_check_detects_a_missing_byte():
    space = ExtentMap(20)
    space.allocate(2, 5)

    with pytest.raises(InvariantError, match="expected an extent at byte 0"):
        space.check(())
    with pytest.raises(InvariantError, match="expected an extent at byte 12, got"):
        space.check((Extent(0, 12),))
