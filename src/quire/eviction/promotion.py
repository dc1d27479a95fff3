"""Gives important tokens their records: chosen when tokens are evicted, once, for good.

Of each lane's tokens that stay and will have left the residual window before the next eviction, the
highest scores get what is free of the lane's records, but no more than their share of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kv.full_precision import FullPrecisionBuffer
from quire.kv.lane_reader import LaneReader
from quire.kv.mixed_precision import PromotedBuffer
from quire.layout.eviction import PREFILL_END
from quire.layout.token_precision import FullPrecisionTokens
from quire.policies.base import ScorePolicy
from quire.policies.eviction import Eviction
from quire.policies.view import KVView
from quire.scheduler.eviction_trace import EvictionEntry


@dataclass(frozen=True, slots=True)
class Promotion:
    """Important tokens of one lane group.

    Attributes:
        promoted: where their records are.
        kept: where tokens are kept as the model made them until they get one.
    """

    promoted: PromotedBuffer
    kept: FullPrecisionBuffer

    def choose(
        self,
        eviction: Eviction,
        view: KVView,
        reader: LaneReader,
        stays: NDArray[np.bool_],
        done: int,
    ) -> NDArray[np.bool_]:
        """Which tokens get a record.

        Args:
            eviction: whose rule scores them.
            view: of the reader.
            reader: of the layers.
            stays: [lanes, slots] of the reader, in the order of positions.
            done: tokens processed.

        Returns:
            [lanes, slots] likewise.
        """
        positions = reader.lane_positions
        record, free = self._records(reader, positions, stays)
        leaving = stays & (record < 0) & leaving_window(self.kept.tokens, eviction, positions, done)
        quota = [
            self.promoted.tokens.quota(*counts)
            for counts in zip(leaving.sum(1).tolist(), stays.sum(1).tolist(), strict=True)
        ]
        scores = _lane_scores(eviction, view, len(positions))
        count = np.minimum(quota, np.minimum(free.sum(axis=1), leaving.sum(axis=1)))
        return _highest(scores, torch.from_numpy(leaving), torch.from_numpy(count)).numpy()

    def put(
        self, reader: LaneReader, row: int, stays: NDArray[np.bool_], promoted: NDArray[np.bool_]
    ) -> None:
        """Give tokens their records.

        Args:
            reader: of the layers, made before anything left.
            row: the sequence.
            stays: [lanes, slots] of the reader, in the order of positions.
            promoted: likewise.
        """
        positions = reader.lane_positions
        lane, slot = np.nonzero(promoted)
        if not len(lane):
            return
        _, free = self._records(reader, positions, stays)
        first_free = np.argsort(~free, axis=1, kind="stable")
        nth = (np.cumsum(promoted, axis=1) - 1)[lane, slot]
        place = lane + reader.lanes.start, first_free[lane, nth]
        self.promoted.put(row, place, positions[lane, slot], self.kept)

    def _records(
        self, reader: LaneReader, positions: NDArray[np.int32], stays: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The record of each token [lanes, slots], -1 for none; [lanes, records] which are free.

        Those of tokens that leave are.
        """
        record = self.promoted.records(reader.row, reader.lanes, positions)
        free = np.ones((len(record), self.promoted.tokens.count), dtype=np.bool_)
        lane, slot = np.nonzero(stays & (record >= 0))
        free[lane, record[lane, slot]] = False
        return record, free


def leaving_window(
    kept: FullPrecisionTokens, eviction: Eviction, positions: NDArray[np.int32], done: int
) -> NDArray[np.bool_]:
    """Tokens that are kept as they were made and will no longer be at the next eviction.

    Sinks always will: everybody attends to them as they were made.

    Args:
        kept: of the lanes.
        eviction: says when the next one is.
        positions: [lanes, slots] of tokens; -1 for none.
        done: tokens processed.
    """
    first = done - kept.recent
    leaves: NDArray[np.bool_] = positions >= max(first, kept.sinks)
    if eviction.spec.when != PREFILL_END:
        # a lane that loses whole pieces may lose some tokens more, and is full again later
        leaves &= positions < first + eviction.spec.every + eviction.piece_tokens - 1
    return leaves


def promoted_entry(
    done: int, positions: NDArray[np.int32], promoted: NDArray[np.bool_]
) -> EvictionEntry:
    """Which tokens got a record, as an entry that says which left would say it."""
    return EvictionEntry.of(done, positions, ~promoted)


def _lane_scores(eviction: Eviction, view: KVView, lanes: int) -> Float[Tensor, "lane slot"]:
    """What the rule thinks of each token; heads that share a lane, together."""
    policy = eviction.policy
    assert isinstance(policy, ScorePolicy), "checked when the engine was made"
    score = policy.checked_score(view).float().cpu()
    return score.view(lanes, -1, score.shape[1]).mean(dim=1)


def _highest(
    scores: Float[Tensor, "lane slot"], among: Bool[Tensor, "lane slot"], count: Tensor
) -> Bool[Tensor, "lane slot"]:
    """So many of each lane's highest; ties give the lower position."""
    order = scores.masked_fill(~among, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order)
    place.scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    return among & (place < count[:, None])
