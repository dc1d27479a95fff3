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
        held = [[p for p in lane if p not in gone] for lane, gone in zip(held, left, strict=True)]

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
    one_range = np.ones((3, 512), dtype=bool)
    one_range[:, 4:68] = False
    positions = np.tile(np.arange(512, dtype=np.int32), (3, 1))
    assert len(EvictionEntry.of(512, positions, one_range).stored) == 2 * 3  # two numbers a lane


def test_retained_sets_are_serialized_as_ranges_and_equal_entries_have_equal_digests():
    keep = np.array([[1, 1, 1, 0, 1, 0, 1, 1], [0] * 7 + [1]], dtype=bool)
    one, again, other = (
        EvictionEntry.of(8, np.tile(np.arange(8), (2, 1)), mask) for mask in (keep, keep, ~keep)
    )
    [retained] = retained_sets([one])

    assert retained.as_dict() == {"num_computed": 8, "retained": ["0-2,4,6-7", "7"]}
    assert one.digest == again.digest != other.digest


def _padded(rows: list, padding: object) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [padding] * (width - len(row)) for row in rows])


def test_promoted_tokens_are_listed_until_they_are_evicted():
    """Two lanes; promoted tokens are recorded in the same form as evicted ones."""

    def entry(num_computed, positions, keep, promoted):
        kept, other = (
            EvictionEntry.of(num_computed, np.array(positions), np.array(mask, dtype=bool))
            for mask in (keep, promoted)
        )
        return replace(kept, promoted=other)

    begin, held = [[0, 1, 2, 3]] * 2, [[0, 1, 3, 4], [0, 1, 2, 4]]
    first = entry(4, begin, [[1, 1, 0, 1], [1, 1, 1, 0]], [[0, 1, 1, 1], [1, 0, 0, 1]])
    second = entry(5, held, [[0, 1, 1, 1], [1, 1, 0, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]])
    plain, sets = replace(first, promoted=None), list(retained_sets([first, second]))

    found = [[lane.tolist() for lane in one.promoted] for one in sets]
    assert found == [[[0], [1, 2]], [[4], [1]]]
    assert sets[1].as_dict()["promoted"] == ["4", "1"]
    assert "promoted" not in next(retained_sets([plain])).as_dict()
    assert first.digest != plain.digest
    assert EvictionEntry.joined(4, [first, first]).promoted.by_lane[2].tolist() == [0]
