"""Eviction traces: the retained tokens follow from the recorded evictions."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduler.eviction_trace import EvictionEntry, retained_sets


@given(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=6), st.randoms())
def test_retained_sets_match_the_recorded_evictions(lanes, chunks, rng):
    """Slots are in any order; an entry evicts the same tokens for any order of slots."""
    held: list[list[int]] = [[] for _ in range(lanes)]
    trace, expected, length = [], [], 0
    for chunk in chunks:
        held = [lane + list(range(length, length + chunk)) for lane in held]
        length += chunk
        for lane in held:
            rng.shuffle(lane)
        retained = [[rng.random() < 0.6 for _ in lane] for lane in held]
        positions, keep = _padded(held, -1), _padded(retained, False)
        entry = EvictionEntry.of(length, positions, keep)
        for lane in held:
            rng.shuffle(lane)
        again = entry.retained(_padded(held, -1))
        left = [
            {p for p, s in zip(*pair, strict=True) if not s}
            for pair in zip(positions.tolist(), keep.tolist(), strict=True)
        ]
        held = [
            [p for p in lane if p not in evicted] for lane, evicted in zip(held, left, strict=True)
        ]

        assert again.sum(axis=1).tolist() == [len(lane) for lane in held]
        assert entry.num_slots == sum(len(evicted - {-1}) for evicted in left)
        trace.append(entry)
        expected.append((length, [sorted(lane) for lane in held]))
    found = [(k.num_computed, [lane.tolist() for lane in k.retained]) for k in retained_sets(trace)]

    assert found == expected


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=4))
def test_adjacent_evicted_tokens_are_stored_in_less_space(evicted):
    keep = np.array([[p not in lane for p in range(31)] for lane in evicted])
    positions = np.tile(np.arange(31, dtype=np.int32), (len(evicted), 1))
    entry = EvictionEntry.of(31, positions, keep)
    left = [p for lane in evicted for p in sorted(lane)]
    plain = EvictionEntry(31, entry.counts, np.array(left, dtype=np.int32))

    assert entry.evicted.tolist() == plain.evicted.tolist()
    assert entry.evicted.dtype == np.int32
    assert len(entry.stored) <= len(plain.stored)
    assert entry.num_slots == plain.num_slots
    assert (entry.retained(positions) == keep).all()
    assert EvictionEntry.joined(31, [entry, entry]).evicted.tolist() == plain.evicted.tolist() * 2


def test_evicted_range_is_stored_as_two_numbers_per_lane():
    keep = np.ones((3, 512), dtype=bool)
    keep[:, 4:68] = False
    positions = np.tile(np.arange(512, dtype=np.int32), (3, 1))

    assert len(EvictionEntry.of(512, positions, keep).stored) == 2 * 3


def test_retained_sets_are_serialized_as_ranges():
    keep = np.array([[1, 1, 1, 0, 1, 0, 1, 1], [0] * 7 + [1]], dtype=bool)
    entry = EvictionEntry.of(8, np.tile(np.arange(8), (2, 1)), keep)
    [retained] = retained_sets([entry])

    assert retained.as_dict() == {"num_computed": 8, "retained": ["0-2,4,6-7", "7"]}


def test_equal_entries_have_equal_digests():
    keep = np.array([[True, False, True]])
    one, other = (EvictionEntry.of(3, np.arange(3)[None], mask) for mask in (keep, ~keep))

    assert one.digest == EvictionEntry.of(3, np.arange(3)[None], keep).digest
    assert one.digest != other.digest


def _padded(rows: list, padding: object) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [padding] * (width - len(row)) for row in rows])


def test_promoted_tokens_are_listed_until_they_are_evicted():
    """Two lanes; promoted tokens are recorded in the same form as evicted ones."""
    positions = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    first = replace(
        EvictionEntry.of(4, positions, np.array([[1, 1, 0, 1], [1, 1, 1, 0]], dtype=bool)),
        promoted=EvictionEntry.of(4, positions, np.array([[0, 1, 1, 1], [1, 0, 0, 1]], dtype=bool)),
    )
    held = np.array([[0, 1, 3, 4], [0, 1, 2, 4]])
    second = replace(
        EvictionEntry.of(5, held, np.array([[0, 1, 1, 1], [1, 1, 0, 1]], dtype=bool)),
        promoted=EvictionEntry.of(5, held, np.array([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=bool)),
    )

    sets = list(retained_sets([first, second]))

    assert [[lane.tolist() for lane in one.promoted] for one in sets] == [
        [[0], [1, 2]],
        [[4], [1]],
    ]
    assert sets[1].as_dict()["promoted"] == ["4", "1"]
    assert "promoted" not in next(retained_sets([replace(first, promoted=None)])).as_dict()
    assert first.digest != replace(first, promoted=None).digest
    joined = EvictionEntry.joined(4, [first, first])
    assert joined.promoted.by_lane[2].tolist() == [0]
