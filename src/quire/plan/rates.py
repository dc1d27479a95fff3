"""Measured rates: copies and prompts, whole steps under a rule, and the file that keeps them."""

import math
from bisect import bisect_left
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from quire.errors import ConfigError
from quire.layout.eviction import parse_policy
from quire.layout.model import ModelSpec

# Rates that preemption is decided by: copies between arena and host, and reading tokens again.


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRate:
    """One way of copying pages: seconds = call_s + pieces * piece_s + bytes / bytes_per_s.

    Attributes:
        bytes_per_s: of large copies.
        call_s: what a swap costs whatever its size.
        piece_s: what each separate extent adds.

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
        """Time of a copy; nothing to copy takes none."""
        if not num_bytes:
            return 0.0
        return self.call_s + pieces * self.piece_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Both ways.

    Attributes:
        out: from the arena to the host.
        back: from the host to the arena.
    """

    out: CopyRate
    back: CopyRate


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRates:
    """How long reading tokens takes.

    A chunk from position a to b: call_s + token_s * (b - a) + square_s * (b^2 - a^2).

    Attributes:
        call_s: of a step, whatever it reads.
        token_s: of each token's products: 2 * parameters / rate.
        square_s: of attention: 2 * layers * heads * head_dim / rate.

    Raises:
        ConfigError: negative seconds, or tokens that take no time.
    """

    token_s: int | float
    square_s: int | float = 0.0
    call_s: int | float = 0.0

    def __post_init__(self) -> None:
        _require_above_zero("token_s", self.token_s)
        _require_seconds(self, "square_s", "call_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """All that a choice between swapping and reading again needs.

    Attributes:
        copies: between arena and host.
        prefill: of the model.
        chunk_tokens: tokens a step reads of a prompt.
    """

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


# ---- step rates ----------------------------------------------------------------------------------

# Rates of whole engine steps under one eviction rule: reading prompts, decoding, evicting.
#
# They hold for one model on one machine: `quire profile MODEL` measures and stores them.


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


# ---- stored rates --------------------------------------------------------------------------------

# Rates of copies, prompts and steps as they stand in the file that `quire profile` writes.

_NUMBERS = ("cap", "every", "when")


def model_key(model: ModelSpec, *, dtype: str, device: str) -> str:
    """What the prefill rates of a model are stored under: its shape, whatever folder it is in.

    Args:
        model: the shape.
        dtype: of its weights, as `bfloat16`.
        device: `cpu`, or the name of the accelerator.
    """
    return (
        f"{model.architecture}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_parameters} parameters, {dtype}, {device}"
    )


def steps_key(key: str, evict: str) -> str:
    """What the step rates of a model under an eviction rule are stored under.

    How much stays and when is not in it: that is what rates are used to find out about.

    Args:
        key: of `model_key`.
        evict: the rule, as `--evict` takes it.

    Raises:
        ConfigError: it is none.
    """
    parsed = parse_policy(evict)
    kept = sorted(item for item in parsed.options.items() if item[0] not in _NUMBERS)
    options = ",".join(f"{name}={value}" for name, value in kept)
    return f"{key}; {parsed.name}:{options}" if options else f"{key}; {parsed.name}"


def copies_from(stored: object) -> dict[str, CopyRates]:
    """Copy rates by device from their JSON object.

    Raises:
        ValueError: a rate that is none.
        KeyError, TypeError: a field is missing, or is not what it should be.
    """
    return {
        device: CopyRates(
            out=CopyRate(**_table(rates["out"])), back=CopyRate(**_table(rates["back"]))
        )
        for device, rates in ((name, _table(value)) for name, value in _table(stored).items())
    }


def prefill_from(stored: object) -> dict[str, PrefillRates]:
    """Prefill rates by `model_key` from their JSON object.

    Raises:
        ValueError: a rate that is none.
        KeyError, TypeError: a field is missing, or is not what it should be.
    """
    return {key: PrefillRates(**_table(rates)) for key, rates in _table(stored).items()}


def steps_from(stored: object) -> dict[str, StepRates]:
    """Step rates by `steps_key` from their JSON object.

    Raises:
        ValueError: a rate that is none.
        KeyError, TypeError: a field is missing, or is not what it should be.
    """
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
