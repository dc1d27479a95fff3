"""Measured rates of copies, prefill and whole steps, and their stored form."""

import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from quire.errors import ConfigError
from quire.layout.eviction import parse_policy
from quire.layout.model import ModelSpec

# Rates that preemption depends on: copies between arena and host memory, and prefill.


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """Rate of copies of pages: seconds = call_s + pieces * piece_s + bytes / bytes_per_s.

    Raises:
        ConfigError: a rate that is not above 0, or negative seconds.
    """

    bytes_per_s: int | float
    call_s: int | float = 0.0
    piece_s: int | float = 0.0

    def __post_init__(self) -> None:
        _require_above_zero("bytes_per_s", self.bytes_per_s)
        _require_seconds(self, "call_s", "piece_s")

    def seconds(self, num_bytes: int | float, pieces: int = 1) -> float:
        """Time of a copy; 0 for 0 bytes."""
        if not num_bytes:
            return 0.0
        return self.call_s + pieces * self.piece_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Rates of copies in both directions."""

    out: CopyRate  # from the arena to host memory
    back: CopyRate  # from host memory to the arena


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRates:
    """Duration of prefill.

    A chunk from position a to b: call_s + token_s * (b - a) + square_s * (b^2 - a^2).

    Attributes:
        call_s: fixed cost of a step.
        token_s: products of a token: 2 * parameters / rate.
        square_s: attention: 2 * layers * heads * head_dim / rate.

    Raises:
        ConfigError: negative seconds, or a `token_s` of 0.
    """

    token_s: int | float
    square_s: int | float = 0.0
    call_s: int | float = 0.0

    def __post_init__(self) -> None:
        _require_above_zero("token_s", self.token_s)
        _require_seconds(self, "square_s", "call_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Rates that the choice between swap and recompute depends on."""

    copies: CopyRates
    prefill: PrefillRates
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"expected chunk_tokens of 1 or more, got {self.chunk_tokens}")


def _require_above_zero(name: str, value: int | float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"expected {name} above 0, got {value}")


def _require_seconds(rates: CopyRate | PrefillRates, *names: str) -> None:
    for field in fields(rates):
        value = getattr(rates, field.name)
        if field.name in names and not 0 <= value < math.inf:
            raise ConfigError(f"expected {field.name} of 0 seconds or more, got {value}")


# Rates of whole engine steps under one eviction rule: prefill, decode, eviction.
#
# They are valid for one model on one machine. `quire profile MODEL` measures and stores them.


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRates:
    """Duration of decode steps; see `quire.plan.batch_verdict` for the formula.

    Attributes:
        batch_s: pairs (rows, seconds of a step without its slots) in ascending order of rows.
            Seconds are linear between two entries and constant before the first. After the last
            two entries they are extrapolated, or constant if these two fall.
        slot_s: cost of each slot of KV that a row attends to, all layers.
        evict_row_s: cost of each row that evicts before the step.
        evict_slot_s: cost of each slot that such a row selects from.

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
        """Seconds of a step with this number of rows, without its slots."""
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
    """Rates of all steps under one rule.

    Attributes:
        whole: prefill of whole prompts or first blocks, with no tokens before them.
        blocks: prefill of later blocks, including the eviction before each; equal to `whole` if
            none were measured.
    """

    whole: PrefillRates
    blocks: PrefillRates
    decode: DecodeRates


# Rates of copies, prefill and steps as stored in the file that `quire profile` writes.

_NUMBERS = ("cap", "every", "when")


def model_key(model: ModelSpec, *, dtype: str, device: str, weight_codec: str = "auto") -> str:
    """Key of a model's prefill rates: its dimensions, independent of its folder."""
    weights = dtype if weight_codec == "auto" else f"{dtype} and {weight_codec}"
    return (
        f"{model.architecture}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_parameters} parameters, {weights}, {device}"
    )


def steps_key(key: str, evict: str) -> str:
    """Key of a model's step rates under an eviction rule.

    The rule's cap and schedule are not part of the key: rates are used to compare them.
    """
    parsed = parse_policy(evict)
    kept = sorted(item for item in parsed.options.items() if item[0] not in _NUMBERS)
    options = ",".join(f"{name}={value}" for name, value in kept)
    return f"{key}; {parsed.name}:{options}" if options else f"{key}; {parsed.name}"


def copies_from(stored: object) -> dict[str, CopyRates]:
    """Copy rates by device from their JSON object."""
    return {
        device: CopyRates(
            out=CopyRate(**_table(rates["out"])), back=CopyRate(**_table(rates["back"]))
        )
        for device, rates in ((name, _table(value)) for name, value in _table(stored).items())
    }


def prefill_from(stored: object) -> dict[str, PrefillRates]:
    """Prefill rates by `model_key` from their JSON object."""
    return {key: PrefillRates(**_table(rates)) for key, rates in _table(stored).items()}


def steps_from(stored: object) -> dict[str, StepRates]:
    """Step rates by `steps_key` from their JSON object."""
    return {
        key: StepRates(
            whole=PrefillRates(**_table(rates["whole"])),
            blocks=PrefillRates(**_table(rates["blocks"])),
            decode=_decode_rates(_table(rates["decode"])),
        )
        for key, rates in ((name, _table(value)) for name, value in _table(stored).items())
    }


def _decode_rates(stored: dict[str, Any]) -> DecodeRates:
    batches = tuple((int(rows), float(seconds)) for rows, seconds in stored.pop("batch_s"))
    return DecodeRates(batch_s=batches, **stored)


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a table of rates, got {value!r}")
    return value
