"""Notices that times have changed for good, and not only by chance.

A two-sided Page-Hinkley test on the logarithm of measured over predicted: sums of errors beyond
half of what is usual, up and down; one that reaches eight times what is usual is a change. A sample
counts three times what is usual at most, so that no single one is taken for a change.
"""

import math

_ALLOWED, _CLIP, _LIMIT = 0.5, 3.0, 8.0  # in usual errors
_PACE, _LEAST_USUAL = 0.05, 0.01


class ChangeDetector:
    """Told of predictions and what came; says when what is predicted no longer holds."""

    def __init__(self) -> None:
        self._usual = 0.1
        self._up = self._down = 0.0

    def add(self, predicted_s: int | float, seconds: int | float) -> bool:
        """Whether times have changed, as of this sample; the sums then begin anew."""
        if predicted_s <= 0 or seconds <= 0:
            return False
        error = math.log(seconds / predicted_s)
        scaled = min(max(error / self._usual, -_CLIP), _CLIP)
        self._usual += _PACE * (abs(scaled) * self._usual - self._usual)
        self._usual = max(self._usual, _LEAST_USUAL)
        self._up = max(0.0, self._up + scaled - _ALLOWED)
        self._down = max(0.0, self._down - scaled - _ALLOWED)
        if max(self._up, self._down) < _LIMIT:
            return False
        self._up = self._down = 0.0
        return True
