"""Rates of whole engine steps under one eviction rule: reading prompts, decoding, evicting.

They hold for one model on one machine: `quire profile --model` measures and stores them.
"""

import math
from dataclasses import dataclass, fields

from quire.errors import ConfigError
from quire.plan.rates import PrefillRates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRates:
    """How long a decode step takes; see `quire.plan.static_run` for the formula.

    Attributes:
        call_s: of a step: reading the weights once, and all that does not grow with the batch.
        row_s: of each row.
        slot_s: of each slot of KV that a row attends to, all layers.
        evict_row_s: of each row that evicts before the step.
        evict_slot_s: of each slot it then chooses among.

    Raises:
        ConfigError: negative seconds, or a step that takes no time.
    """

    call_s: int | float
    row_s: int | float = 0.0
    slot_s: int | float = 0.0
    evict_row_s: int | float = 0.0
    evict_slot_s: int | float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"expected {field.name} of 0 seconds or more, got {value}")
        if not self.call_s + self.row_s > 0:
            raise ConfigError("expected a decode step to take time: call_s and row_s are both 0")


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
