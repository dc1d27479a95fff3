"""Eviction trace of a sequence: a recomputation replays it to evict the same tokens.

An entry holds the evicted positions of each lane. It takes at most 4 bytes per evicted token of a
lane, less than a hundredth of the token's keys and values. A run of consecutive positions takes
8 bytes. `streaming` evicts one run per lane and eviction, so its trace is smaller than the token
ids of the stream.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int32]
_LANE = 1 << 40  # larger than any position: lane and position are packed into one number


@dataclass(frozen=True)
class EvictionEntry:
    """One eviction.

    Attributes:
        num_computed: tokens of the sequence that had been computed.
        counts: [lanes] evicted tokens of each lane.
        source: evicted positions, ascending within each lane, lane after lane; or the first
            positions of all runs of consecutive positions, followed by the run lengths, if that is
            shorter (`in_runs`); or a function that returns either, which may wait for the device.
        promoted: the tokens promoted to a finer codec by this eviction, as an entry of its own;
            None without mixed precision.
    """

    num_computed: int
    counts: NDArray[np.int32]
    source: Positions | Callable[[], Positions]
    promoted: "EvictionEntry | None" = None

    @cached_property
    def stored(self) -> Positions:
        """`source` as an array."""
        return self.source() if callable(self.source) else self.source

    @classmethod
    def of(
        cls, num_computed: int, positions: NDArray[np.integer], keep: NDArray[np.bool_]
    ) -> "EvictionEntry":
        """Create an entry from a mask of retained slots.

        Args:
            num_computed: computed tokens.
            positions: [lanes, slots] logical positions; -1 for an empty slot.
            keep: [lanes, slots] mask of the retained slots.
        """
        evicted = ~keep & (positions >= 0)
        index = np.flatnonzero(evicted)  # np.nonzero over two axes is many times slower
        left = index // max(1, evicted.shape[1]) * _LANE + positions.ravel()[index]
        left.sort()
        counts = evicted.sum(axis=1, dtype=np.int32)
        return cls(num_computed, counts, in_runs((left % _LANE).astype(np.int32)))

    @classmethod
    def joined(cls, num_computed: int, parts: "Sequence[EvictionEntry]") -> "EvictionEntry":
        """Concatenate entries of disjoint lanes into one entry, in order."""
        counts = np.concatenate([part.counts for part in parts])
        promoted = [part.promoted for part in parts if part.promoted is not None]
        return cls(
            num_computed,
            counts,
            in_runs(np.concatenate([part.evicted for part in parts])),
            promoted=cls.joined(num_computed, promoted) if promoted else None,
        )

    def of_lanes(self, lanes: NDArray[np.int64]) -> "EvictionEntry":
        """Return the part of an entry in some lanes, in this order."""
        if np.array_equal(lanes, np.arange(len(self.counts))):
            return self
        by_lane = self.by_lane
        chosen = [by_lane[lane] for lane in lanes.tolist()]
        return EvictionEntry(
            self.num_computed,
            self.counts[lanes],
            in_runs(np.concatenate(chosen)),
            promoted=None if self.promoted is None else self.promoted.of_lanes(lanes),
        )

    @classmethod
    def merged(cls, parts: "Sequence[EvictionEntry]") -> "EvictionEntry":
        """Join the entries of layers, ascending, that were cut one after the other."""
        stored = in_runs(np.concatenate([part.evicted for part in parts]))
        counts = np.stack([part.counts for part in parts]).sum(axis=0, dtype=np.int32)
        return cls(parts[0].num_computed, counts, stored)

    def only_of(self, lanes: slice) -> "EvictionEntry":
        """Return an entry that leaves all other lanes as they are."""
        by_lane, others = self.by_lane, np.full(len(self.counts), True)
        others[lanes] = False
        return EvictionEntry(
            self.num_computed,
            np.where(others, np.int32(0), self.counts),
            in_runs(np.concatenate(by_lane[lanes])),
        )

    @property
    def evicted(self) -> Positions:
        """The evicted positions, ascending within each lane, lane after lane."""
        if len(self.stored) == self.num_slots:
            return self.stored
        first, lengths = np.split(self.stored, 2)
        before = np.cumsum(lengths, dtype=np.int32) - lengths
        return np.repeat(first - before, lengths) + np.arange(self.num_slots, dtype=np.int32)

    def retained(self, positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Mask [lanes, slots] of the slots that a replay of this eviction retains."""
        lanes = np.arange(len(self.counts))
        evicted = np.repeat(lanes, self.counts) * _LANE + self.evicted
        held = lanes[:, None] * _LANE + positions
        retained: NDArray[np.bool_] = (positions >= 0) & ~np.isin(held, evicted)
        return retained

    @property
    def by_lane(self) -> list[Positions]:
        """The evicted positions (`evicted`), split by lane."""
        return np.split(self.evicted, np.cumsum(self.counts)[:-1])

    @property
    def num_slots(self) -> int:
        """Evicted slots, over all lanes."""
        return int(self.counts.sum())

    @property
    def digest(self) -> str:
        """Digest of the entry's contents; equal entries have equal digests."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(np.int64(self.num_computed).tobytes())
        digest.update(self.counts.tobytes() + self.evicted.tobytes())
        if self.promoted is not None:
            digest.update(self.promoted.digest.encode())
        return digest.hexdigest()


def in_runs(left: Positions) -> Positions:
    """Encode evicted positions as runs of consecutive ones if that is shorter."""
    begins = np.flatnonzero(np.diff(left, prepend=-2) != 1)
    if 2 * len(begins) >= len(left):
        return left
    lengths = np.diff(begins, append=len(left))
    return np.concatenate([left[begins], lengths]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class RetainedSets:
    """The retained positions after one eviction.

    Attributes:
        num_computed: tokens that had been computed.
        retained: the retained positions of each lane, ascending.
        promoted: for each lane, the retained positions that are stored in a finer codec; None
            without mixed precision.
    """

    num_computed: int
    retained: tuple[Positions, ...]
    promoted: tuple[Positions, ...] | None = None

    def as_dict(self) -> dict[str, object]:
        """Return JSON values; the positions of a lane are text such as "0-3,17,20-31"."""
        found: dict[str, object] = {
            "num_computed": self.num_computed,
            "retained": [_ranges(lane) for lane in self.retained],
        }
        if self.promoted is not None:
            found["promoted"] = [_ranges(lane) for lane in self.promoted]
        return found


def _ranges(positions: Positions) -> str:
    """Format ascending positions as comma-separated ranges."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    ends = ((int(part[0]), int(part[-1])) for part in parts if len(part))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def retained_sets(trace: Sequence[EvictionEntry]) -> Iterator[RetainedSets]:
    """Yield the retained positions after each eviction of a sequence, in order."""
    if not trace:
        return
    lanes = len(trace[0].counts)
    empty = np.arange(0, dtype=np.int32)
    kept, promoted = [empty] * lanes, [empty] * lanes
    length = 0
    for entry in trace:
        new, left = np.arange(length, entry.num_computed, dtype=np.int32), entry.by_lane
        kept = [_without(held, new, evicted) for held, evicted in zip(kept, left, strict=True)]
        length, finer = entry.num_computed, None
        if entry.promoted is not None:
            newly = entry.promoted.by_lane
            promoted = [_without(*lane) for lane in zip(promoted, newly, left, strict=True)]
            finer = tuple(promoted)
        yield RetainedSets(entry.num_computed, tuple(kept), finer)


def _without(held: Positions, new: Positions, evicted: Positions) -> Positions:
    """Return the held and new positions that were not evicted, ascending."""
    return np.sort(np.setdiff1d(np.concatenate([held, new]), evicted, assume_unique=True))
