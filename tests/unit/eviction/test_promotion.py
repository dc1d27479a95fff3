"""Tokens that receive promoted records: those that leave the window before the next eviction."""

import numpy as np
import pytest

from quire.eviction.promotion import leaving_window
from quire.layout.eviction import DECODE, PREFILL_END, EvictionSpec
from quire.layout.token_precision import FullPrecisionTokens
from quire.policies.eviction import Eviction

POSITIONS = np.array([[*range(20), -1]], dtype=np.int32)


@pytest.mark.parametrize(
    ("window", "when", "every", "piece_tokens", "expected"),
    [
        ((0, 8), DECODE, 3, 1, range(12, 15)),  # at 23 tokens 15 is the oldest in the window
        ((0, 8), DECODE, 8, 1, range(12, 20)),
        ((0, 8), DECODE, 3, 4, range(12, 18)),  # three more may leave
        ((0, 8), PREFILL_END, 3, 1, range(12, 20)),  # there is no next eviction
        ((6, 17), DECODE, 5, 1, range(6, 8)),  # from 3 on, except sinks
        ((6, 30), DECODE, 5, 1, range(0)),  # the window starts before the first token
        ((6, 30), PREFILL_END, 5, 1, range(6, 20)),
    ],
)
def test_leaving_window_selects_tokens_that_leave_before_the_next_eviction(
    window, when, every, piece_tokens, expected
):
    """The request has 20 processed tokens."""
    sinks, recent = window
    tokens = FullPrecisionTokens(sinks=sinks, residual=recent, recent=recent)
    spec = EvictionSpec(cap=16, every=every, when=when)

    found = leaving_window(tokens, Eviction(spec=spec, piece_tokens=piece_tokens), POSITIONS, 20)

    assert POSITIONS[found].tolist() == list(expected)
