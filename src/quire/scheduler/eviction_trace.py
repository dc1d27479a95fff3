"""What has left a sequence, eviction by eviction: enough to read it again to the same kept sets.

An entry holds the positions that left, lane by lane, so that all entries of a sequence together
take 4 bytes at most for each token of a lane that is gone: less than a hundredth of its keys and
values. Neighbours take 8 bytes together: what `streaming` lets go of in a stream without an end,
one run of neighbours a lane and eviction, takes less than the ids of the stream's tokens.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int32]
_LANE = 1 << 40  # a position is less: lane and position make one number


@dataclass(frozen=True, slots=True)
class EvictionEntry:
    """One eviction.

    Attributes:
        num_computed: tokens of the sequence that had been processed.
        counts: [lanes] tokens that left each lane.
        stored: their positions, lane by lane, ascending; or where that is shorter, and only there,
            the first positions of runs of neighbours and behind them how long those are.
        wanted: [lanes] tokens that might have stayed, whole pieces or not; None where nobody asks:
            a rule that took notes is asked again with them.
        promoted: the tokens that got a record in a finer codec then, as if they had left; None
            where there are no records.
    """

    num_computed: int
    counts: NDArray[np.int32]
    stored: Positions
    wanted: NDArray[np.int32] | None = None
    promoted: "EvictionEntry | None" = None

    @classmethod
    def of(
        cls, num_computed: int, positions: NDArray[np.integer], keep: NDArray[np.bool_]
    ) -> "EvictionEntry":
        """What a mask means.

        Args:
            num_computed: tokens processed.
            positions: [lanes, slots] logical positions; -1 where a lane has no slot.
            keep: [lanes, slots] which stay.
        """
        gone = ~keep & (positions >= 0)
        place = np.flatnonzero(gone)  # of two axes at once is many times slower
        left = place // max(1, gone.shape[1]) * _LANE + positions.ravel()[place]
        left.sort()
        counts = gone.sum(axis=1, dtype=np.int32)
        return cls(num_computed, counts, _in_runs((left % _LANE).astype(np.int32)))

    @classmethod
    def joined(cls, num_computed: int, parts: "Sequence[EvictionEntry]") -> "EvictionEntry":
        """One entry of those of some lanes each, one behind the other."""
        counts = np.concatenate([part.counts for part in parts])
        promoted = [part.promoted for part in parts if part.promoted is not None]
        return cls(
            num_computed,
            counts,
            _in_runs(np.concatenate([part.left for part in parts])),
            promoted=cls.joined(num_computed, promoted) if promoted else None,
        )

    @property
    def left(self) -> Positions:
        """The positions that left, lane by lane, ascending."""
        if len(self.stored) == self.num_slots:
            return self.stored
        first, lengths = np.split(self.stored, 2)
        before = np.cumsum(lengths, dtype=np.int32) - lengths
        return np.repeat(first - before, lengths) + np.arange(self.num_slots, dtype=np.int32)

    def stays(self, positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of a sequence's slots stay when the same leave again: [lanes, slots]."""
        lanes = np.arange(len(self.counts))
        gone = np.repeat(lanes, self.counts) * _LANE + self.left
        held = lanes[:, None] * _LANE + positions
        stays: NDArray[np.bool_] = (positions >= 0) & ~np.isin(held, gone)
        return stays

    @property
    def by_lane(self) -> list[Positions]:
        """`left` for each lane."""
        return np.split(self.left, np.cumsum(self.counts)[:-1])

    @property
    def num_slots(self) -> int:
        """Slots that left, over all lanes."""
        return int(self.counts.sum())

    @property
    def digest(self) -> str:
        """Of everything in it: equal entries have equal ones."""
        made = hashlib.blake2b(digest_size=8)
        made.update(np.int64(self.num_computed).tobytes())
        made.update(self.counts.tobytes() + self.left.tobytes())
        if self.promoted is not None:
            made.update(self.promoted.digest.encode())
        return made.hexdigest()


def _in_runs(left: Positions) -> Positions:
    """Positions as `EvictionEntry.stored` has them."""
    begins = np.flatnonzero(np.diff(left, prepend=-2) != 1)
    if 2 * len(begins) >= len(left):
        return left
    lengths = np.diff(begins, append=len(left))
    return np.concatenate([left[begins], lengths]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class RetainedSets:
    """What stayed after one eviction.

    Attributes:
        num_computed: tokens processed then.
        kept: for each lane the positions that stayed, ascending.
        promoted: likewise those of them with a record in a finer codec; None where there are no
            records.
    """

    num_computed: int
    kept: tuple[Positions, ...]
    promoted: tuple[Positions, ...] | None = None

    def as_dict(self) -> dict[str, object]:
        """JSON values; positions of a lane as text, such as "0-3,17,20-31"."""
        found: dict[str, object] = {
            "num_computed": self.num_computed,
            "kept": [_ranges(lane) for lane in self.kept],
        }
        if self.promoted is not None:
            found["promoted"] = [_ranges(lane) for lane in self.promoted]
        return found


def _ranges(positions: Positions) -> str:
    """Ascending positions, neighbours joined."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    ends = ((int(part[0]), int(part[-1])) for part in parts if len(part))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def retained_sets(trace: Sequence[EvictionEntry]) -> Iterator[RetainedSets]:
    """What stayed after each eviction of a sequence, from its first on."""
    if not trace:
        return
    lanes = len(trace[0].counts)
    nobody = np.arange(0, dtype=np.int32)
    kept, promoted = [nobody] * lanes, [nobody] * lanes
    length = 0
    for entry in trace:
        new, left = np.arange(length, entry.num_computed, dtype=np.int32), entry.by_lane
        kept = [_without(held, new, gone) for held, gone in zip(kept, left, strict=True)]
        length, finer = entry.num_computed, None
        if entry.promoted is not None:
            newly = entry.promoted.by_lane
            promoted = [_without(*lane) for lane in zip(promoted, newly, left, strict=True)]
            finer = tuple(promoted)
        yield RetainedSets(entry.num_computed, tuple(kept), finer)


def _without(held: Positions, new: Positions, gone: Positions) -> Positions:
    """What is left of both, ascending."""
    return np.sort(np.setdiff1d(np.concatenate([held, new]), gone, assume_unique=True))
