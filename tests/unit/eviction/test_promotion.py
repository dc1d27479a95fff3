"""Which tokens are asked for, when records are given: those that will not be asked for again."""

import numpy as np
import pytest

from quire.eviction.promotion import leaving_window
from quire.layout.eviction import DECODE, PREFILL_END, EvictionSpec
from quire.layout.token_precision import FullPrecisionTokens
from quire.policies.eviction import Eviction

POSITIONS = np.array([[*range(20), -1]], dtype=np.int32)


@pytest.mark.parametrize(
    ("kept", "when", "every", "piece_tokens", "expected"),
    [
        ((0, 8), DECODE, 3, 1, range(12, 15)),  # at 23 tokens 15 is the oldest in the window
        ((0, 8), DECODE, 8, 1, range(12, 20)),
        ((0, 8), DECODE, 3, 4, range(12, 18)),  # three more may leave, and come again
        ((0, 8), PREFILL_END, 3, 1, range(12, 20)),  # there is no next one
        ((6, 17), DECODE, 5, 1, range(6, 8)),  # from 3 on, but for sinks
        ((6, 30), DECODE, 5, 1, range(0)),  # the window reaches back beyond the first token
        ((6, 30), PREFILL_END, 5, 1, range(6, 20)),
    ],
)
def test_tokens_that_leave_the_window_before_the_next_eviction(
    kept, when, every, piece_tokens, expected
):
    """20 tokens have been processed."""
    sinks, recent = kept
    tokens = FullPrecisionTokens(of="full", sinks=sinks, residual=recent, recent=recent)
    spec = EvictionSpec(cap=16, every=every, when=when)

    found = leaving_window(tokens, Eviction(spec=spec, piece_tokens=piece_tokens), POSITIONS, 20)

    assert POSITIONS[found].tolist() == list(expected)
