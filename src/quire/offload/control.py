"""Which split a step takes: the model's, corrected by what stands still, moved only where it pays.

The model's rates are followed on every operation (`profiler`). What it cannot know shows in waits:
where the device waits for the link more tokens are recomputed, where the link waits for the device
fewer. Only waits that the model does not explain count; they add up, so a wrong model still ends
near the right split.
"""

import math

from quire.errors import ConfigError
from quire.offload.timeline import DEVICE, IN, Timeline
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_seconds, pipelined_split

_DEAD_BAND = 0.02  # of a step: waits that are noise
_MOST_CORRECTION = 0.3  # of all tokens
_MOST_MOVE = 0.25  # of all tokens, in a step: one bad step says little
_LEAK = 0.95  # of the correction, in a step whose waits the model explains


class SplitController:
    """Keeps one sequence of splits steady.

    Args:
        unit: tokens that go together; splits are whole units, or all tokens.
        least_gain: of a step's time, below which the split stays.
        pace: of the correction by waits; 0: none.

    Attributes:
        num_moves: times at which the split moved other than with the length.

    Raises:
        ConfigError: a negative gain or pace.
    """

    def __init__(
        self, *, unit: int = 1, least_gain: int | float = 0.02, pace: int | float = 0.25
    ) -> None:
        if unit < 1 or min(least_gain, pace) < 0:
            raise ConfigError(f"expected unit >= 1, gains >= 0, got {unit}, {least_gain}, {pace}")
        self.num_moves = 0
        self._unit, self._least_gain, self._pace = unit, least_gain, pace
        self._share: float | None = None
        self._correction = 0.0

    @property
    def correction(self) -> float:
        """Part of all tokens that is recomputed beyond what the model says."""
        return self._correction

    def split(self, rates: OffloadRates, tokens: int) -> int:
        """Tokens to recompute in the next step; 0 where activations do not pay.

        Args:
            rates: of a layer, as known now.
            tokens: of all rows.
        """
        if rates.x_s >= rates.kv_s or not tokens:
            self._share = None
            return 0
        best = pipelined_split(rates, tokens) + self._correction * tokens
        wanted = self._whole(best, tokens)
        if self._share is None:
            self._share = wanted / tokens
            return wanted
        held = self._whole(self._share * tokens, tokens)
        if abs(wanted - held) < self._unit or not self._pays(rates, tokens, wanted, held):
            return held
        self.num_moves += 1
        reach = max(_MOST_MOVE * tokens, self._unit)
        moved = self._whole(min(max(wanted, held - reach), held + reach), tokens)
        self._share = moved / tokens
        return moved

    def observe(self, timeline: Timeline, rates: OffloadRates, tokens: int) -> None:
        """Learn from what stood still in a step, its first layer and what was expected left out.

        Args:
            timeline: of the step that took the last split.
            rates: of a layer, this step learned from.
            tokens: of all rows, in that step.
        """
        if self._share is None or not timeline.seconds:
            return
        device_s = sum(timeline.stalls(DEVICE, from_layer=1).values())
        link_s = sum(timeline.stalls(IN, from_layer=1).values())
        error = (device_s - link_s) / timeline.seconds
        unexplained = error - _expected_error(rates, tokens, round(self._share * tokens))
        if abs(unexplained) <= _DEAD_BAND:
            self._correction *= _LEAK
        if abs(error) <= _DEAD_BAND or error * unexplained <= 0:
            return
        step = self._pace * math.copysign(min(abs(error), abs(unexplained)), error)
        moved = self._correction + step
        self._correction = min(max(moved, -_MOST_CORRECTION), _MOST_CORRECTION)

    def _pays(self, rates: OffloadRates, tokens: int, wanted: int, held: int) -> bool:
        """Whether the model gains by moving, or the correction alone asks for a move as large."""
        held_s, wanted_s = (pipelined_seconds(rates, tokens, x) for x in (held, wanted))
        off = abs(wanted - held) / tokens
        return held_s > wanted_s * (1 + self._least_gain) or off > 2 * self._least_gain

    def _whole(self, best: int | float, tokens: int) -> int:
        """Whole units below: too few cost less than too many."""
        if best >= tokens:
            return tokens
        return int(max(best, 0.0) // self._unit) * self._unit


def _expected_error(rates: OffloadRates, tokens: int, x_tokens: int) -> float:
    """Waits of the device, less waits of the link, over a layer's time, if the model is right."""
    carried_s = rates.link_s + rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)
    made_s = rates.recompute_s * x_tokens + rates.other_s
    return (carried_s - made_s) / max(carried_s, made_s)
