"""Rates of whole engine steps under one eviction rule: reading prompts, decoding, evicting.

They hold for one model on one machine: `quire profile MODEL` measures and stores them.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from quire.errors import ConfigError
from quire.plan.rates import PrefillRates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRates:
    """How long a decode step takes; see `quire.plan.static_run` for the formula.

    Attributes:
        batch_s: rows, and the seconds of a step of so many without its slots; rising rows. Between
            two of them lies a straight line, which goes on behind the last two unless it falls;
            fewer rows than the first take as long as those.
        slot_s: of each slot of KV that a row attends to, all layers.
        evict_row_s: of each row that evicts before the step.
        evict_slot_s: of each slot it then chooses among.

    Raises:
        ConfigError: negative seconds, a step that takes no time, or rows that do not rise.
    """

    batch_s: tuple[tuple[int, int | float], ...]
    slot_s: int | float = 0.0
    evict_row_s: int | float = 0.0
    evict_slot_s: int | float = 0.0

    def __post_init__(self) -> None:
        for name in ("slot_s", "evict_row_s", "evict_slot_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"expected {name} of 0 seconds or more, got {value}")
        rows = [rows for rows, _ in self.batch_s]
        if not rows or rows[0] < 1 or any(a >= b for a, b in pairwise(rows)):
            raise ConfigError(f"expected batches of rising rows, 1 or more, got {rows}")
        if not all(0 < seconds < math.inf for _, seconds in self.batch_s):
            raise ConfigError(f"expected decode steps that take time, got {self.batch_s}")

    def products_s(self, rows: int) -> float:
        """Seconds of a step of so many rows, without its slots."""
        measured = [batch for batch, _ in self.batch_s]
        right = min(bisect_left(measured, rows), len(measured) - 1)
        (low, low_s), (high, high_s) = self.batch_s[max(0, right - 1)], self.batch_s[right]
        if rows <= low or low == high:
            return float(low_s)
        slope_s = (high_s - low_s) / (high - low)
        if rows > high:
            return high_s + max(0.0, slope_s) * (rows - high)
        return low_s + slope_s * (rows - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """All steps under one rule.

    Attributes:
        whole: of prompts, or first blocks, read with nothing ahead of them.
        blocks: of blocks of a prompt behind an eviction, which is counted in; as `whole` where
            none were measured.
        decode: of decode steps.
    """

    whole: PrefillRates
    blocks: PrefillRates
    decode: DecodeRates
