"""Promotes important tokens: records of what their codes lost, selected once, at an eviction.

Candidates are the retained tokens of a lane that leave the residual window before the next
eviction. Those with the highest scores get the lane's free records, up to a quota.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kv.lane_reader import LaneReader, VectorReader
from quire.kv.token_precision import FullPrecisionBuffer, PromotedBuffer
from quire.layout.eviction import PREFILL_END
from quire.layout.pages import KEY, VALUE
from quire.layout.token_precision import FullPrecisionTokens
from quire.policies.base import ScorePolicy
from quire.policies.eviction import Eviction
from quire.policies.keydiff import KeyDiff
from quire.policies.view import KVView
from quire.scheduler.eviction_trace import EvictionEntry


@dataclass(frozen=True, slots=True)
class Promotion:
    """Selects the promoted tokens of one lane group.

    Attributes:
        promoted: buffer of the records.
        full_precision: full-precision buffer that holds tokens until they get a record.
    """

    promoted: PromotedBuffer
    full_precision: FullPrecisionBuffer

    def choose(
        self,
        eviction: Eviction,
        view: KVView,
        reader: LaneReader,
        retained: NDArray[np.bool_],
        done: int,
    ) -> NDArray[np.bool_]:
        """Select the tokens that get a record.

        Args:
            eviction: its rule scores the tokens.
            view: view of the reader's layers.
            reader: reader of the layers.
            retained: [lanes, slots] retained slots of the reader, in the order of positions.
            done: tokens processed.

        Returns:
            [lanes, slots] True for each token that gets a record, in the order of positions.
        """
        positions = reader.lane_positions
        record, free = self._records(reader, positions, retained)
        leaving = (
            retained
            & (record < 0)
            & leaving_window(self.full_precision.tokens, eviction, positions, done)
        )
        quota = [
            self.promoted.tokens.quota(*counts)
            for counts in zip(leaving.sum(1).tolist(), retained.sum(1).tolist(), strict=True)
        ]
        scores = _lane_scores(eviction, view, len(positions))
        count = np.minimum(quota, np.minimum(free.sum(axis=1), leaving.sum(axis=1)))
        return _highest(scores, torch.from_numpy(leaving), torch.from_numpy(count)).numpy()

    def put(
        self, reader: LaneReader, retained: NDArray[np.bool_], promoted: NDArray[np.bool_]
    ) -> None:
        """Write what the codes of tokens lost to their records, before slots move.

        Args:
            reader: reader of the layers.
            retained: [lanes, slots] retained slots of the reader, in the order of positions.
            promoted: [lanes, slots] tokens that get a record, in the order of positions.
        """
        positions = reader.lane_positions
        lane, slot = np.nonzero(promoted)
        if not len(lane):
            return
        _, free = self._records(reader, positions, retained)
        first_free = np.argsort(~free, axis=1, kind="stable")
        nth = (np.cumsum(promoted, axis=1) - 1)[lane, slot]
        place = lane + reader.lanes.start, first_free[lane, nth]
        key, value = (VectorReader(reader, plane).lost(lane, slot) for plane in (KEY, VALUE))
        self.promoted.put(reader.row, place, positions[lane, slot], (key, value))

    def _records(
        self, reader: LaneReader, positions: NDArray[np.int32], retained: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the record of each token [lanes, slots], -1 for none, and a mask of free records.

        The mask is [lanes, records]. Records of evicted tokens are free.
        """
        record = self.promoted.records(reader.row, reader.lanes, positions)
        free = np.ones((len(record), self.promoted.tokens.count), dtype=np.bool_)
        lane, slot = np.nonzero(retained & (record >= 0))
        free[lane, record[lane, slot]] = False
        return record, free


def leaving_window(
    full: FullPrecisionTokens, eviction: Eviction, positions: NDArray[np.int32], done: int
) -> NDArray[np.bool_]:
    """Mark the full-precision tokens that will have left the window at the next eviction.

    Sinks never leave it: all queries attend to them in full precision.

    Args:
        full: full-precision tokens of the lanes.
        eviction: its spec determines when the next eviction happens.
        positions: [lanes, slots] of tokens; -1 for none.
        done: tokens processed.
    """
    first = done - full.recent
    leaves: NDArray[np.bool_] = positions >= max(first, full.sinks)
    if eviction.spec.when != PREFILL_END:
        # a lane that evicts whole pieces may lose more tokens, and then fills up later
        leaves &= positions < first + eviction.spec.every + eviction.piece_tokens - 1
    return leaves


def promoted_entry(
    done: int, positions: NDArray[np.int32], promoted: NDArray[np.bool_]
) -> EvictionEntry:
    """Return the promoted tokens as an entry, in the format of evicted tokens."""
    return EvictionEntry.of(done, positions, ~promoted)


def _lane_scores(eviction: Eviction, view: KVView, lanes: int) -> Float[Tensor, "lane slot"]:
    """Return a score of each token; the mean over heads that share a lane.

    Rules that return a retained set without scores use those of `keydiff`, which reads only keys.
    """
    policy = eviction.policy if isinstance(eviction.policy, ScorePolicy) else KeyDiff()
    score = policy.checked_score(view).float().cpu()
    return score.view(lanes, -1, score.shape[1]).mean(dim=1)


def _highest(
    scores: Float[Tensor, "lane slot"], among: Bool[Tensor, "lane slot"], count: Tensor
) -> Bool[Tensor, "lane slot"]:
    """Mark the `count` highest scores of each lane; ties prefer the lower position."""
    order = scores.masked_fill(~among, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    return among & (rank < count[:, None])
