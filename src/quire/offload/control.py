"""Controls the recompute split of each step: the model's optimum, corrected by observed stalls.

The profiler updates the model's rates on every operation. Effects outside the model show as
stalls: if the device waits for the link, more tokens are recomputed; if the link waits for the
device, fewer. Only stalls that the model does not explain count. Their corrections accumulate, so
the split converges even if the model is wrong.
"""

import math

from quire.errors import ConfigError
from quire.offload.split import OffloadRates, pipelined_seconds, pipelined_split
from quire.offload.timeline import DEVICE, IN, Timeline

_DEAD_BAND = 0.02  # fraction of the step's time; smaller stalls are noise
_MAX_CORRECTION = 0.3  # fraction of all tokens
_MAX_MOVE = 0.25  # fraction of all tokens per step: limits the effect of one slow step
_LEAK = 0.95  # decay of the correction in a step whose stalls the model explains


class SplitController:
    """Controls the recompute split of one sequence of steps, with hysteresis.

    Args:
        unit: granularity of splits in tokens; a split is a multiple of it, or all tokens.
        min_gain: smallest predicted gain, as a fraction of the step's time, that moves the split.
        pace: gain of the correction by stalls; 0 disables it.

    Attributes:
        num_moves: number of times the split moved for another reason than a new length.

    Raises:
        ConfigError: a negative gain or pace.
    """

    def __init__(
        self, *, unit: int = 1, min_gain: int | float = 0.02, pace: int | float = 0.25
    ) -> None:
        if unit < 1 or min(min_gain, pace) < 0:
            raise ConfigError(f"expected unit >= 1, gains >= 0, got {unit}, {min_gain}, {pace}")
        self.num_moves = 0
        self._unit, self._min_gain, self._pace = unit, min_gain, pace
        self._share: float | None = None
        self._correction = 0.0

    @property
    def correction(self) -> float:
        """Fraction of all tokens recomputed in addition to the model's optimum."""
        return self._correction

    def split(self, rates: OffloadRates, tokens: int) -> int:
        """Return the number of tokens to recompute in the next step; 0 if activations do not pay.

        Args:
            rates: current rates of a layer.
            tokens: offloaded tokens of all rows.
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
        reach = max(_MAX_MOVE * tokens, self._unit)
        moved = self._whole(min(max(wanted, held - reach), held + reach), tokens)
        self._share = moved / tokens
        return moved

    def observe(self, timeline: Timeline, rates: OffloadRates, tokens: int) -> None:
        """Learn from the stalls of a step, except expected ones and those of its first layer.

        Args:
            timeline: timeline of the step that used the last split.
            rates: rates of a layer, including what the profiler learned from this step.
            tokens: offloaded tokens of all rows in that step.
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
        self._correction = min(max(moved, -_MAX_CORRECTION), _MAX_CORRECTION)

    def _pays(self, rates: OffloadRates, tokens: int, wanted: int, held: int) -> bool:
        """Whether the model predicts a gain, or the correction alone asks for a large move."""
        held_s, wanted_s = (pipelined_seconds(rates, tokens, x) for x in (held, wanted))
        off = abs(wanted - held) / tokens
        return held_s > wanted_s * (1 + self._min_gain) or off > 2 * self._min_gain

    def _whole(self, best: int | float, tokens: int) -> int:
        """Round down to whole units: too few tokens cost less than too many."""
        if best >= tokens:
            return tokens
        return int(max(best, 0.0) // self._unit) * self._unit


def _expected_error(rates: OffloadRates, tokens: int, x_tokens: int) -> float:
    """Device stalls minus link stalls over a layer's time, as the model predicts them."""
    transfer_s = rates.link_s + rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)
    device_s = rates.recompute_s * x_tokens + rates.other_s
    return (transfer_s - device_s) / max(transfer_s, device_s)
