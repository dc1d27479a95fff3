"""Rates that preemption is decided by: copies between arena and host, and reading tokens again."""

import math
from dataclasses import dataclass, fields

from quire.errors import ConfigError


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
