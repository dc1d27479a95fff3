"""What left, eviction by eviction, gives back what stayed."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.scheduler.eviction_trace import EvictionEntry, retained_sets


@given(st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=6), st.randoms())
def test_entries_and_kept_sets_say_the_same(lanes, chunks, rng):
    """Slots lie in any order; the same leave again whatever order they lie in then."""
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
        assert entry.num_slots == sum(len(gone - {-1}) for gone in left)
        trace.append(entry)
        expected.append((length, [sorted(lane) for lane in held]))
    found = [(k.num_computed, [lane.tolist() for lane in k.kept]) for k in retained_sets(trace)]

    assert found == expected


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=4))
def test_neighbours_take_less_room_and_the_same_have_left(gone):
    keep = np.array([[p not in lane for p in range(31)] for lane in gone])
    positions = np.tile(np.arange(31, dtype=np.int32), (len(gone), 1))
    entry = EvictionEntry.of(31, positions, keep)
    left = [p for lane in gone for p in sorted(lane)]
    plain = EvictionEntry(31, entry.counts, np.array(left, dtype=np.int32))

    assert entry.evicted.tolist() == plain.evicted.tolist()
    assert entry.evicted.dtype == np.int32
    assert len(entry.stored) <= len(plain.stored)
    assert entry.num_slots == plain.num_slots
    assert (entry.retained(positions) == keep).all()
    assert EvictionEntry.joined(31, [entry, entry]).evicted.tolist() == plain.evicted.tolist() * 2


def test_a_stream_s_trace_takes_two_numbers_for_each_lane_and_eviction():
    keep = np.ones((3, 512), dtype=bool)
    keep[:, 4:68] = False
    positions = np.tile(np.arange(512, dtype=np.int32), (3, 1))

    assert len(EvictionEntry.of(512, positions, keep).stored) == 2 * 3


def test_kept_sets_are_written_as_ranges():
    keep = np.array([[1, 1, 1, 0, 1, 0, 1, 1], [0] * 7 + [1]], dtype=bool)
    entry = EvictionEntry.of(8, np.tile(np.arange(8), (2, 1)), keep)
    [kept] = retained_sets([entry])

    assert kept.as_dict() == {"num_computed": 8, "kept": ["0-2,4,6-7", "7"]}


def test_equal_entries_have_equal_digests():
    keep = np.array([[True, False, True]])
    one, other = (EvictionEntry.of(3, np.arange(3)[None], mask) for mask in (keep, ~keep))

    assert one.digest == EvictionEntry.of(3, np.arange(3)[None], keep).digest
    assert one.digest != other.digest


def _padded(rows: list, filling: object) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [filling] * (width - len(row)) for row in rows])


def test_raised_tokens_stay_important_until_they_leave():
    """Two lanes; what is raised is written as what left would be."""
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
