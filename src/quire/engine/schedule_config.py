"""What a user can say about steps and queues."""

from dataclasses import dataclass
from typing import no_type_check

from quire.engine.tenants import parse_tenants
from quire.errors import ConfigError
from quire.spec.options import option, require_types


@no_type_check  # run-time type checks in tests must not answer before our own refusals
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """How much a step does and how many requests run.

    Attributes are options; see their help.
    """

    max_running: int = option(256, help="requests that hold KV at the same time")
    step_tokens: int = option(
        2048, help="tokens a step processes at most, decoding rows first", unit="tokens"
    )
    chunk_tokens: int = option(
        2048, help="tokens of one prompt a step reads at most", unit="tokens"
    )
    reserve_share: float = option(
        0.01, help="part of the KV memory kept free when a request is let in, 0 to 1"
    )
    tenants: str = option(
        "",
        help="who shares the KV memory and the steps, such as "
        "'a:weight=2,guaranteed=64MiB,burst=32MiB; b'; without any, every name weighs the same",
    )

    def __post_init__(self) -> None:
        require_types(self)
        parse_tenants(self.tenants)
        for name in ("max_running", "step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0 <= self.reserve_share < 1:
            raise ConfigError(f"expected reserve_share in [0, 1), got {self.reserve_share}")

    @property
    def longest_chunk(self) -> int:
        """Tokens one prompt can add in a step."""
        return min(self.step_tokens, self.chunk_tokens)
