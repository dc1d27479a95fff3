"""Token ids for pieces of text that are known by their identity and their length alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.sim.traces.base import Segment

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ID_BITS = 31  # ids fit into int32 wherever they are packed


def token_ids(segments: Sequence[Segment]) -> list[int]:
    """Ids of a sequence of pieces, from their contents and offsets alone.

    Equal contents give equal ids at equal offsets, others differ but for one chance in 2^31 a
    token. Ids are no entries of a vocabulary.

    Source: the mixing function of SplitMix64 (Steele et al., 2014).
    """
    lengths = np.array([segment.tokens for segment in segments], dtype=np.int64)
    contents = np.array([segment.content for segment in segments], dtype=np.int64)
    total = int(lengths.sum())
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    offsets = (np.arange(total) - starts).astype(np.uint64)
    seeds = _mixed(np.repeat(contents, lengths).view(np.uint64))
    ids: list[int] = (_mixed(seeds + offsets) >> np.uint64(64 - _ID_BITS)).astype(np.int64).tolist()
    return ids


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values * _STEP + _STEP  # wraps around, as meant
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
